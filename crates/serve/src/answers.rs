//! What fine-tuned models answer over HTTP: labels, ranks, entities, spans and choices. Texts become requests, and those
//! answers, by the functions that the commands use (`henson_infer`); only the batch between is the queue's.

use std::ops::Range;
use std::sync::Arc;

use henson_infer::{
    Choices, Classified, Grouped, InferError, Input, Length, Model, Question, Ranked, Request, TagInput, Tagged,
    ZeroShot, ZeroShotScores,
};
use henson_text::code_point_offsets;
use serde_json::{Value, json};

use crate::app::{Answer, App, Call};
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
    let answer =
        classify(&model, body.inputs.list, (truncate, model.model.task_length()), Model::prepare_classify).await?;
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
    let answer = ranked(&model, &body.query, &body.texts, truncate).await?;
    Ok(answer.map(|ranked| {
        let ranks = ranked.iter().zip(body.texts).enumerate().map(|(index, (ranked, text))| Rank {
            index,
            text: body.return_text.then_some(text),
            score: if body.raw_scores { ranked.logit } else { ranked.score },
        });
        let mut ranks: Vec<Rank> = ranks.collect();
        ranks.sort_by(|a, b| b.score.total_cmp(&a.score));
        ranks
    }))
}

/// The same as Jina and version 1 of Cohere have it.
pub(crate) async fn rerank_documents(
    call: Call<wire::DocumentsRequest>,
) -> Result<Answer<wire::RankedDocuments>, ApiError> {
    let Call { app, model, body } = call;
    let wire::DocumentsRequest { query, documents, top_n, return_documents, .. } = body;
    let documents = documents.into_iter().map(wire::Document::into_text).collect();
    let answer = documents_ranked(&app, &model, &query, documents, top_n, return_documents).await?;
    let (name, tokens) = (model.name.clone(), answer.tokens);
    let usage = wire::OpenAiUsage { prompt_tokens: tokens, total_tokens: tokens };
    Ok(answer.map(|results| wire::RankedDocuments {
        object: Some("list"),
        model: Some(name),
        results,
        usage: Some(usage),
        meta: json!({"api_version": {"version": "1"}}),
    }))
}

/// The same as version 2 of Cohere has it.
pub(crate) async fn rerank_documents_2(
    call: Call<wire::DocumentsRequest2>,
) -> Result<Answer<wire::RankedDocuments>, ApiError> {
    let Call { app, model, body } = call;
    let most = body.max_tokens_per_doc.unwrap_or(usize::MAX);
    if most == 0 {
        return Err(ApiError::new(Kind::Validation, "`max_tokens_per_doc` is 0: expected at least 1"));
    }
    // What is longer than the model reads is cut later; only less than that needs a look at the tokens.
    let cut = |document: wire::Document| match most < model.model.most_tokens() {
        true => beginning(&model.model, document.into_text(), most),
        false => Ok(document.into_text()),
    };
    let documents = body.documents.into_iter().map(cut).collect::<Result<Vec<String>, ApiError>>()?;
    let answer = documents_ranked(&app, &model, &body.query, documents, body.top_n, false).await?;
    let meta = json!({"api_version": {"version": "2"}});
    Ok(answer.map(|results| wire::RankedDocuments { object: None, model: None, results, usage: None, meta }))
}

/// The first tokens of a text, as a text.
fn beginning(model: &Model, mut text: String, tokens: usize) -> Result<String, ApiError> {
    let pieces = model.tokenizer().encode(&text)?;
    if let Some((start, _)) = pieces.offsets.get(tokens) {
        text.truncate(*start);
    }
    Ok(text)
}

/// Documents by their relevance to a query, so many of them as are asked for. Longer ones are cut, as there.
async fn documents_ranked(
    app: &App,
    model: &Arc<Loaded>,
    query: &str,
    texts: Vec<String>,
    top: Option<usize>,
    with_texts: bool,
) -> Result<Answer<Vec<wire::RankedDocument>>, ApiError> {
    check_count(app, texts.len(), "documents")?;
    if top == Some(0) {
        return Err(ApiError::new(Kind::Validation, "`top_n` is 0: expected at least 1, or nothing for all documents"));
    }
    let answer = ranked(model, query, &texts, true).await?;
    Ok(answer.map(|ranked| {
        let documents = ranked.iter().zip(texts).enumerate().map(|(index, (ranked, text))| wire::RankedDocument {
            index,
            relevance_score: ranked.score,
            document: with_texts.then_some(wire::TextOfDocument { text }),
        });
        let mut documents: Vec<wire::RankedDocument> = documents.collect();
        documents.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
        documents.truncate(top.unwrap_or(usize::MAX));
        documents
    }))
}

/// The score of each text as an answer to a query.
async fn ranked(
    model: &Arc<Loaded>,
    query: &str,
    texts: &[String],
    truncate: bool,
) -> Result<Answer<Vec<Ranked>>, ApiError> {
    let pairs = texts.iter().map(|text| TextOrPair(query.to_owned(), Some(text.clone()))).collect();
    let rerank = |model: &Model, pair: Input<'_>, length: Length| match pair {
        Input::Pair(query, text) => model.prepare_rerank(query, text, length),
        Input::One(text) => model.prepare_rerank("", text, length),
    };
    classify(model, pairs, (truncate, model.model.rerank_length()), rerank).await
}

/// Labels of the caller's own with scores, the best first; for one input not in a list.
pub(crate) async fn zero_shot(call: Call<wire::ZeroShotRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { app, model, body } = call;
    let labels = body.candidate_labels.0;
    check_count(&app, labels.len(), "candidate_labels")?;
    check_count(&app, body.inputs.0.len(), "inputs")?;
    // Every label is a sequence of its own for every text.
    check_count(&app, labels.len().saturating_mul(body.inputs.0.len()), "inputs times candidate_labels")?;
    let single = body.inputs.0.len() == 1;
    let names = labels.clone();
    let bytes = labels.len() * body.inputs.0.iter().map(String::len).sum::<usize>();
    let answer = ask(&model, bytes, move |model| {
        let cut = Cut { field: "inputs", most: model.task_tokens(), truncate: true, left: false };
        let labels = labels.iter().map(|label| cut.bounded(label)).collect::<Result<Vec<_>, _>>()?;
        let hypothesis = cut.bounded(&body.hypothesis_template)?;
        let asked = ZeroShot { labels: &labels, hypothesis, multi_label: body.multi_label };
        let requests = body.inputs.0.iter().map(|text| {
            let text = cut.bounded(text)?;
            Ok(model.model.prepare_zero_shot(text, &asked, None)?)
        });
        Ok(Request::all(requests.collect::<Result<_, ApiError>>()?))
    });
    let predictions = |found: ZeroShotScores| {
        let both = names.iter().zip(found.scores);
        let mut predictions: Vec<Prediction> =
            both.map(|(label, score)| Prediction { label: label.clone(), score }).collect();
        predictions.sort_by(|a, b| b.score.total_cmp(&a.score));
        json!(predictions)
    };
    Ok(answer.await?.map(|found| {
        let mut found = found.into_iter().map(predictions);
        if single { found.next().unwrap_or_default() } else { found.collect() }
    }))
}

/// The entities of each text, in order.
pub(crate) async fn tag(call: Call<wire::TagRequest>) -> Result<Answer<Vec<Value>>, ApiError> {
    let Call { app, model, body } = call;
    check_count(&app, body.inputs.0.len(), "inputs")?;
    if let Some(strategy) = body.aggregation_strategy {
        let bytes = body.inputs.0.iter().map(String::len).sum();
        let answer = ask(&model, bytes, move |model| {
            let length = Length { windows: true, ..model.model.task_length() };
            let group = |text| model.model.prepare_tag_groups(TagInput::Text(text), strategy, length);
            let requests = body.inputs.0.iter().map(|text| group(text));
            Ok(Request::all(requests.collect::<Result<_, _>>()?))
        });
        return Ok(answer.await?.map(|texts| texts.iter().map(groups).collect()));
    }
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
    (truncate, length): (bool, Length),
    prepare: fn(&Model, Input<'_>, Length) -> Result<Request<A>, InferError>,
) -> Result<Answer<Vec<A>>, ApiError> {
    let bytes = inputs.iter().map(|TextOrPair(a, b)| a.len() + b.as_ref().map_or(0, String::len)).sum();
    let answer = ask(model, bytes, move |model| {
        let most = length.most.unwrap_or(usize::MAX).min(model.model.most_tokens());
        let cut = Cut { field: "inputs", most, truncate, left: false };
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
    parts(&tagged.text, tagged.entities.iter().map(|entity| (&entity.place, entity.label.as_str(), entity.score)))
}

/// The groups of one text as JSON.
fn groups(grouped: &Grouped) -> Value {
    parts(&grouped.text, grouped.groups.iter().map(|group| (&group.place, group.label.as_str(), group.score)))
}

fn parts<'a>(text: &str, parts: impl Iterator<Item = (&'a Range<usize>, &'a str, f32)> + Clone) -> Value {
    let bytes: Vec<(usize, usize)> = parts.clone().map(|(place, ..)| (place.start, place.end)).collect();
    let found = parts.zip(code_point_offsets(text, &bytes)).map(|((place, label, score), (start, end))| {
        json!({"text": &text[place.clone()], "start": start, "end": end, "label": label, "score": score})
    });
    found.collect()
}
