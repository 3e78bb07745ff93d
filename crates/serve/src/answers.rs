//! What fine-tuned models answer over HTTP: labels, ranks, entities, spans and choices. Texts become sequences, and logits
//! answers, by the functions that the commands use (`henson_text`, `henson_infer`); only the batch between is the queue's.

use std::ops::Range;
use std::sync::Arc;

use henson_infer::{
    Input, Length, Output, QuestionSettings, Read, TagInput, Tagged, join_windows, sigmoid, softmax, text_windows,
};
use henson_text::{Features, SpanLogits, code_point_offsets, find_answers};
use serde_json::{Value, json};

use crate::app::{Answer, Call};
use crate::error::{ApiError, Kind};
use crate::models::{Cut, Loaded, too_long};
use crate::queue::Sequence;
use crate::routes::{bounded, check_count, off_the_road};
use crate::wire::{self, Prediction, Rank, TextOrPair};

/// Labels with scores, the best first; for one input not in a list, as Text Embeddings Inference has it.
pub(crate) async fn predict(call: Call<wire::PredictRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.inputs.list.len(), "inputs")?;
    let single = body.inputs.single;
    let truncate = body.truncate.unwrap_or(app.settings.truncate);
    let Answer { body: logits, tokens, dropped } = classify(&model, body.inputs.list, truncate).await?;
    let (problem, labels) = (model.model.problem()?, model.model.labels());
    let predictions = logits.into_iter().map(|logits| {
        let scores = if body.raw_scores { logits } else { problem.scores(&logits) };
        let mut predictions: Vec<Prediction> =
            labels.iter().zip(scores).map(|(label, score)| Prediction { label: label.clone(), score }).collect();
        predictions.sort_by(|a, b| b.score.total_cmp(&a.score));
        json!(predictions)
    });
    let mut predictions: Vec<Value> = predictions.collect();
    let body = if single { predictions.remove(0) } else { Value::Array(predictions) };
    Ok(Answer { body, tokens, dropped })
}

/// Texts with the score of each as an answer to the query, the best first.
pub(crate) async fn rerank(call: Call<wire::RerankRequest>) -> Result<Answer<Vec<Rank>>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.texts.len(), "texts")?;
    let truncate = body.truncate.unwrap_or(app.settings.truncate);
    let pairs = body.texts.iter().map(|text| TextOrPair(body.query.clone(), Some(text.clone()))).collect();
    let Answer { body: logits, tokens, dropped } = classify(&model, pairs, truncate).await?;
    let score = |logits: Vec<f32>| if body.raw_scores { logits[0] } else { sigmoid(logits[0]) };
    let ranks = logits.into_iter().zip(body.texts).enumerate().map(|(index, (logits, text))| Rank {
        index,
        text: body.return_text.then_some(text),
        score: score(logits),
    });
    let mut ranks: Vec<Rank> = ranks.collect();
    ranks.sort_by(|a, b| b.score.total_cmp(&a.score));
    Ok(Answer { body: ranks, tokens, dropped })
}

/// The entities of each text, in order.
pub(crate) async fn tag(call: Call<wire::TagRequest>) -> Result<Answer<Vec<Value>>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.inputs.0.len(), "inputs")?;
    let bytes = body.inputs.0.iter().map(String::len).sum();
    let theirs = Arc::clone(&model);
    let texts = off_the_road(bytes, move || {
        // All of a text is read, whatever its length.
        let length = Length { windows: true, ..theirs.model.task_length() };
        let texts = body.inputs.0.iter().map(|text| Ok(theirs.model.lay_out_words(TagInput::Text(text), length)?));
        texts.collect::<Result<Vec<_>, ApiError>>()
    });
    let mut texts = texts.await?;
    let counts: Vec<usize> = texts.iter().map(|text| text.windows.windows.len()).collect();
    let windows: Vec<Vec<Features>> = texts.iter_mut().map(|text| std::mem::take(&mut text.windows.windows)).collect();
    let Ran { outputs, tokens } = run(&model, windows, &Read::Labels).await?;
    let mut logits = outputs.into_iter().map(|output| output.numbers);
    let body = texts.into_iter().zip(counts).map(|(text, count)| {
        let logits: Vec<Vec<f32>> = logits.by_ref().take(count).collect();
        entities(&model.model.read_tags(text, &logits))
    });
    Ok(Answer { body: body.collect(), tokens, dropped: 0 })
}

/// The best answers to a question, and what the model thinks of there being none.
pub(crate) async fn answer(call: Call<wire::AnswerRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { model, body: wire::AnswerRequest { question, context, top, .. }, .. } = call;
    for (text, what) in [(&question, "question"), (&context, "context")] {
        if text.trim().is_empty() {
            return Err(ApiError::new(Kind::Empty, format!("`{what}` is empty")));
        }
    }
    if top == 0 {
        return Err(ApiError::new(Kind::Validation, "`top` is 0, expected at least 1"));
    }
    let theirs = Arc::clone(&model);
    let laid_out = off_the_road(question.len() + context.len(), move || {
        let settings = theirs.model.question_settings();
        // A question must leave room for the passage in a model of few positions.
        let room = settings.max_length.saturating_sub(theirs.model.tokenizer().template().pair_specials());
        let settings = QuestionSettings { max_question: settings.max_question.min(room / 2), ..settings };
        let windows = theirs.model.tokenizer().question(&question, &context, &settings)?;
        Ok((windows, context))
    });
    let (windows, context) = laid_out.await?;
    let dropped = windows.dropped;
    let Ran { outputs, tokens } = run(&model, vec![windows.windows.clone()], &Read::Spans).await?;
    let logits: Vec<SpanLogits> = outputs
        .into_iter()
        .map(|output| {
            let (start, end) = output.numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).unzip();
            SpanLogits { start, end }
        })
        .collect();
    let found = find_answers(&windows, &logits, &context, &model.model.answer_settings());
    let place = |place: &Option<Range<usize>>| {
        let place = place.clone().map(|place| code_point_offsets(&context, &[(place.start, place.end)])[0]);
        (place.map(|(start, _)| start), place.map(|(_, end)| end))
    };
    // The chosen one first, whatever the threshold for "no answer" made of the order.
    let order = found.chosen.into_iter().chain((0..found.candidates.len()).filter(|i| Some(*i) != found.chosen));
    let answers = order.take(top).map(|i| {
        let candidate = &found.candidates[i];
        let (start, end) = place(&candidate.place);
        json!({"text": candidate.text(&context), "start": start, "end": end, "score": candidate.probability})
    });
    let answers: Vec<Value> = answers.collect();
    let no_answer = found.candidates.iter().find(|candidate| candidate.place.is_none());
    let body = json!({
        "answers": answers,
        "no_answer": no_answer.map(|candidate| candidate.probability),
        "null_odds": found.null_odds,
    });
    Ok(Answer { body, tokens, dropped })
}

/// How likely each choice is.
pub(crate) async fn choose(call: Call<wire::ChooseRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.choices.len(), "choices")?;
    let bytes = body.context.len() + body.choices.iter().map(String::len).sum::<usize>();
    let theirs = Arc::clone(&model);
    let sequences = off_the_road(bytes, move || {
        let cut = Cut { field: "choices", most: theirs.task_tokens(), truncate: true, left: false };
        let context = bounded(&body.context, &cut)?;
        let choices = body.choices.iter().map(|choice| bounded(choice, &cut)).collect::<Result<Vec<_>, _>>()?;
        Ok(theirs.model.tokenizer().choices(context, &choices, cut.most)?)
    });
    let sequences = sequences.await?;
    let dropped = sequences.iter().map(|sequence| sequence.dropped).sum();
    let Ran { outputs, tokens } = run(&model, vec![sequences], &Read::Sequence).await?;
    let logits: Vec<f32> = outputs.iter().filter_map(|output| output.numbers.first().copied()).collect();
    let scores = softmax(&logits);
    let best = (0..scores.len()).reduce(|best, i| if scores[i] > scores[best] { i } else { best });
    Ok(Answer { body: json!({"best": best, "scores": scores}), tokens, dropped })
}

struct Ran {
    outputs: Vec<Output>,
    tokens: usize,
}

async fn run(model: &Loaded, texts: Vec<Vec<Features>>, read: &Read) -> Result<Ran, ApiError> {
    let tokens = texts.iter().flatten().map(Features::len).sum();
    Ok(Ran { outputs: model.run(Sequence::of_texts(texts, read)).await?, tokens })
}

/// The logits of texts and pairs, read as the model was fine-tuned: cut, or in windows.
async fn classify(
    model: &Arc<Loaded>,
    inputs: Vec<TextOrPair>,
    truncate: bool,
) -> Result<Answer<Vec<Vec<f32>>>, ApiError> {
    let bytes = inputs.iter().map(|TextOrPair(a, b)| a.len() + b.as_ref().map_or(0, String::len)).sum();
    let theirs = Arc::clone(model);
    let laid_out = off_the_road(bytes, move || {
        let windows = theirs.model.task_length().windows;
        let cut = Cut { field: "inputs", most: theirs.task_tokens(), truncate, left: false };
        let bounded = |text| if windows { Ok(text) } else { bounded(text, &cut) };
        let laid_out = inputs.iter().map(|TextOrPair(first, second)| {
            let input = match second {
                Some(second) => Input::Pair(bounded(first)?, bounded(second)?),
                None => Input::One(bounded(first)?),
            };
            let (windows, dropped) = text_windows(theirs.model.tokenizer(), input, cut.most, windows)?;
            if dropped > 0 && !cut.truncate {
                return Err(too_long(&cut, windows.iter().map(Features::len).sum::<usize>() + dropped));
            }
            Ok((windows, dropped))
        });
        laid_out.collect::<Result<Vec<(Vec<Features>, usize)>, ApiError>>()
    });
    let laid_out = laid_out.await?;
    let dropped = laid_out.iter().map(|(_, dropped)| dropped).sum();
    let lengths: Vec<Vec<usize>> =
        laid_out.iter().map(|(windows, _)| windows.iter().map(Features::len).collect()).collect();
    let texts = laid_out.into_iter().map(|(windows, _)| windows).collect();
    let Ran { outputs, tokens } = run(model, texts, &Read::Sequence).await?;
    let mut logits = outputs.into_iter().map(|output| output.numbers);
    let body = lengths.into_iter().map(|lengths| join_windows(lengths.into_iter().zip(logits.by_ref())));
    Ok(Answer { body: body.collect(), tokens, dropped })
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
