//! What fine-tuned models answer over HTTP: labels, ranks, entities, spans and choices. Texts become requests, and those
//! answers, by the functions that the commands use (`henson_infer`); only the batch between is the queue's.

use std::ops::Range;
use std::sync::Arc;

use henson_infer::{
    Choices, Classified, InferError, Input, Length, Model, Question, Request, TagInput, Tagged, sigmoid,
};
use henson_text::code_point_offsets;
use serde_json::{Value, json};

use crate::app::{Answer, Call};
use crate::error::{ApiError, Kind};
use crate::models::{Cut, Loaded};
use crate::routes::{ask, check_count};
use crate::wire::{self, Prediction, Rank, TextOrPair};

/// Labels with scores, the best first; for one input not in a list, as Text Embeddings Inference has it.
pub(crate) async fn predict(call: Call<wire::PredictRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.inputs.list.len(), "inputs")?;
    let single = body.inputs.single;
    let truncate = body.truncate.unwrap_or(app.settings.truncate);
    let labels = model.model.labels();
    let predictions = |classified: Classified| {
        let scores = if body.raw_scores { classified.logits } else { classified.scores };
        let mut predictions: Vec<Prediction> =
            labels.iter().zip(scores).map(|(label, score)| Prediction { label: label.clone(), score }).collect();
        predictions.sort_by(|a, b| b.score.total_cmp(&a.score));
        json!(predictions)
    };
    let answer = classify(&model, body.inputs.list, truncate, Model::prepare_classify).await?;
    Ok(answer.map(|classified| {
        let mut predictions = classified.into_iter().map(predictions);
        if single { predictions.next().unwrap_or_default() } else { predictions.collect() }
    }))
}

/// Texts with the score of each as an answer to the query, the best first.
pub(crate) async fn rerank(call: Call<wire::RerankRequest>) -> Result<Answer<Vec<Rank>>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.texts.len(), "texts")?;
    let truncate = body.truncate.unwrap_or(app.settings.truncate);
    let pairs = body.texts.iter().map(|text| TextOrPair(body.query.clone(), Some(text.clone()))).collect();
    let answer = classify(&model, pairs, truncate, Model::prepare_logits).await?;
    let score = |logit: f32| if body.raw_scores { logit } else { sigmoid(logit) };
    Ok(answer.map(|logits| {
        let ranks = logits.iter().zip(body.texts).enumerate().map(|(index, (logits, text))| Rank {
            index,
            text: body.return_text.then_some(text),
            score: score(logits[0]),
        });
        let mut ranks: Vec<Rank> = ranks.collect();
        ranks.sort_by(|a, b| b.score.total_cmp(&a.score));
        ranks
    }))
}

/// The entities of each text, in order.
pub(crate) async fn tag(call: Call<wire::TagRequest>) -> Result<Answer<Vec<Value>>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.inputs.0.len(), "inputs")?;
    let answer = ask(&model, body.inputs.0.iter().map(String::len).sum(), move |model| {
        // All of a text is read, whatever its length.
        let length = Length { windows: true, ..model.model.task_length() };
        let requests = body.inputs.0.iter().map(|text| model.model.prepare_tag(TagInput::Text(text), length));
        Ok(Request::all(requests.collect::<Result<_, _>>()?))
    });
    Ok(answer.await?.map(|texts| texts.iter().map(entities).collect()))
}

/// The best answers to a question, and what the model thinks of there being none.
pub(crate) async fn answer(call: Call<wire::AnswerRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { model, body, .. } = call;
    for (text, what) in [(&body.question, "question"), (&body.context, "context")] {
        if text.trim().is_empty() {
            return Err(ApiError::new(Kind::Empty, format!("`{what}` is empty")));
        }
    }
    if body.top == 0 {
        return Err(ApiError::new(Kind::Validation, "`top` is 0, expected at least 1"));
    }
    let body = Arc::new(body);
    let theirs = Arc::clone(&body);
    let found = ask(&model, body.question.len() + body.context.len(), move |model| {
        let question = Question { question: &theirs.question, passage: &theirs.context };
        let (length, settings) = (model.model.question_settings(), model.model.answer_settings());
        Ok(model.model.prepare_answer(question, length, settings)?)
    });
    let found = found.await?;
    let context = &body.context;
    let place = |place: &Option<Range<usize>>| {
        let place = place.clone().map(|place| code_point_offsets(context, &[(place.start, place.end)])[0]);
        (place.map(|(start, _)| start), place.map(|(_, end)| end))
    };
    Ok(found.map(|found| {
        // The chosen one first, whatever the threshold for "no answer" made of the order.
        let order = found.chosen.into_iter().chain((0..found.candidates.len()).filter(|i| Some(*i) != found.chosen));
        let answers = order.take(body.top).map(|i| {
            let candidate = &found.candidates[i];
            let (start, end) = place(&candidate.place);
            json!({"text": candidate.text(context), "start": start, "end": end, "score": candidate.probability})
        });
        let no_answer = found.candidates.iter().find(|candidate| candidate.place.is_none());
        json!({
            "answers": answers.collect::<Vec<Value>>(),
            "no_answer": no_answer.map(|candidate| candidate.probability),
            "null_odds": found.null_odds,
        })
    }))
}

/// How likely each choice is.
pub(crate) async fn choose(call: Call<wire::ChooseRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.choices.len(), "choices")?;
    let bytes = body.context.len() + body.choices.iter().map(String::len).sum::<usize>();
    let chosen = ask(&model, bytes, move |model| {
        let cut = Cut { field: "choices", most: model.task_tokens(), truncate: true, left: false };
        let context = cut.bounded(&body.context)?;
        let choices = body.choices.iter().map(|choice| cut.bounded(choice)).collect::<Result<Vec<_>, _>>()?;
        Ok(model.model.prepare_choose(Choices { context, choices: &choices }, Some(cut.most))?)
    });
    Ok(chosen.await?.map(|chosen| json!({"best": chosen.best(), "scores": chosen.probabilities})))
}

/// What is asked of texts and pairs, read as the model was fine-tuned: cut, or in windows.
async fn classify<A: 'static>(
    model: &Arc<Loaded>,
    inputs: Vec<TextOrPair>,
    truncate: bool,
    prepare: fn(&Model, Input<'_>, Length) -> Result<Request<A>, InferError>,
) -> Result<Answer<Vec<A>>, ApiError> {
    let bytes = inputs.iter().map(|TextOrPair(a, b)| a.len() + b.as_ref().map_or(0, String::len)).sum();
    let answer = ask(model, bytes, move |model| {
        let length = model.model.task_length();
        let cut = Cut { field: "inputs", most: model.task_tokens(), truncate, left: false };
        let bounded = |text| if length.windows { Ok(text) } else { cut.bounded(text) };
        let requests = inputs.iter().map(|TextOrPair(first, second)| {
            let input = match second {
                Some(second) => Input::Pair(bounded(first)?, bounded(second)?),
                None => Input::One(bounded(first)?),
            };
            cut.checked(prepare(&model.model, input, length)?)
        });
        Ok(Request::all(requests.collect::<Result<_, ApiError>>()?))
    });
    answer.await
}

/// The entities of one text as JSON.
fn entities(tagged: &Tagged) -> Value {
    let Tagged { text, entities, .. } = tagged;
    let bytes: Vec<(usize, usize)> = entities.iter().map(|entity| (entity.place.start, entity.place.end)).collect();
    let found = entities.iter().zip(code_point_offsets(text, &bytes)).map(|(entity, (start, end))| {
        let part = &text[entity.place.clone()];
        json!({"text": part, "start": start, "end": end, "label": entity.label, "score": entity.score})
    });
    found.collect()
}
