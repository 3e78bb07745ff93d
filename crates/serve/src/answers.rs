//! What fine-tuned models answer over HTTP: labels, ranks, entities, spans and choices. Texts become sequences, and logits
//! answers, by the functions that the commands use (`henson_text`, `henson_infer`); only the batch between is the queue's.

use std::ops::Range;
use std::sync::Arc;

use henson_infer::{Model, Problem, QuestionSettings, Stride};
use henson_models::Head;
use henson_text::{Features, SpanLogits, TagSet, code_point_offsets, find_answers, split_words};
use serde_json::{Value, json};

use crate::app::{Answer, App, Call};
use crate::compute::{Output, Read, Task};
use crate::error::{ApiError, Kind};
use crate::models::{Cut, Loaded, too_long};
use crate::routes::{bounded, check_count, off_the_road, wrong_head};
use crate::wire::{self, Prediction, Rank, TextOrPair};

/// Labels with scores, the best first; for one input not in a list, as Text Embeddings Inference has it.
pub(crate) async fn predict(call: Call<wire::PredictRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { app, model, body } = call;
    if !matches!(model.head(), Head::Sequence { .. }) {
        return Err(wrong_head(&model, "a sequence classifier"));
    }
    check_count(&app, body.inputs.list.len(), "inputs")?;
    let single = body.inputs.single;
    let cut = cut(&app, &model, body.truncate);
    let Answer { body: logits, tokens, dropped } = classify(&model, body.inputs.list, cut).await?;
    let (problem, labels) = (model.model.problem()?, model.model.labels());
    let predictions = logits.into_iter().map(|logits| {
        let scores = match problem {
            _ if body.raw_scores => logits,
            Problem::SingleLabel => softmax(&logits),
            Problem::MultiLabel => logits.into_iter().map(sigmoid).collect(),
            Problem::Regression => logits,
        };
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
    if !matches!(model.head(), Head::Sequence { labels: 1 }) {
        return Err(wrong_head(&model, "a sequence classifier with one label, a re-ranker"));
    }
    check_count(&app, body.texts.len(), "texts")?;
    let cut = cut(&app, &model, body.truncate);
    let pairs = body.texts.iter().map(|text| TextOrPair(body.query.clone(), Some(text.clone()))).collect();
    let Answer { body: logits, tokens, dropped } = classify(&model, pairs, cut).await?;
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
    if !matches!(model.head(), Head::Token { .. }) {
        return Err(wrong_head(&model, "a token classifier"));
    }
    check_count(&app, body.inputs.0.len(), "inputs")?;
    let bytes = body.inputs.0.iter().map(String::len).sum();
    let theirs = Arc::clone(&model);
    let texts = off_the_road(bytes, move || {
        let most = theirs.model.most_tokens();
        let room = most.saturating_sub(theirs.model.tokenizer().template().single_specials());
        let stride = Some(Stride::Step((room / 2).max(1)));
        let texts = body.inputs.0.into_iter().map(|text| {
            let words = split_words(&text);
            let windows = theirs.model.tokenizer().words_in_windows(&text, &words, most, stride)?;
            Ok((text, words, windows))
        });
        texts.collect::<Result<Vec<_>, ApiError>>()
    });
    let mut texts = texts.await?;
    let counts: Vec<usize> = texts.iter().map(|(.., windows)| windows.windows.len()).collect();
    let sequences = texts.iter_mut().flat_map(|(.., windows)| std::mem::take(&mut windows.windows)).collect();
    let Ran { outputs, tokens } = run(&model, sequences, Read::Labels).await?;
    let mut outputs = outputs.into_iter();
    let body = texts.iter().zip(counts).map(|((text, words, windows), count)| {
        let outputs: Vec<Output> = outputs.by_ref().take(count).collect();
        entities(&model.model, text, words, &windows.places, &outputs)
    });
    Ok(Answer { body: body.collect(), tokens, dropped: 0 })
}

/// The best answers to a question, and what the model thinks of there being none.
pub(crate) async fn answer(call: Call<wire::AnswerRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { model, body: wire::AnswerRequest { question, context, top, .. }, .. } = call;
    if model.head() != Head::Span {
        return Err(wrong_head(&model, "a question-answering model"));
    }
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
    let Ran { outputs, tokens } = run(&model, windows.windows.clone(), Read::Spans).await?;
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
    if model.head() != Head::Choice {
        return Err(wrong_head(&model, "a multiple-choice model"));
    }
    check_count(&app, body.choices.len(), "choices")?;
    let bytes = body.context.len() + body.choices.iter().map(String::len).sum::<usize>();
    let theirs = Arc::clone(&model);
    let sequences = off_the_road(bytes, move || {
        let cut = Cut { most: theirs.model.most_tokens(), truncate: true, left: false };
        let context = bounded(&body.context, &cut)?;
        let choices = body.choices.iter().map(|choice| bounded(choice, &cut)).collect::<Result<Vec<_>, _>>()?;
        Ok(theirs.model.tokenizer().choices(context, &choices, cut.most)?)
    });
    let sequences = sequences.await?;
    let dropped = sequences.iter().map(|sequence| sequence.dropped).sum();
    let Ran { outputs, tokens } = run(&model, sequences, Read::Sequence).await?;
    let logits: Vec<f32> = outputs.iter().filter_map(|output| output.numbers.first().copied()).collect();
    let scores = softmax(&logits);
    let best = (0..scores.len()).reduce(|best, i| if scores[i] > scores[best] { i } else { best });
    Ok(Answer { body: json!({"best": best, "scores": scores}), tokens, dropped })
}

struct Ran {
    outputs: Vec<Output>,
    tokens: usize,
}

async fn run(model: &Loaded, sequences: Vec<Features>, read: Read) -> Result<Ran, ApiError> {
    let tokens = sequences.iter().map(Features::len).sum();
    let tasks = sequences.into_iter().map(|features| Task { features, read: read.clone() }).collect();
    let outputs = model.run(tasks).await?;
    if outputs.iter().any(|output| output.numbers.iter().any(|x| !x.is_finite())) {
        let message = "the model's scores are not finite: its weights are broken or far too large";
        return Err(ApiError::new(Kind::Backend, message));
    }
    Ok(Ran { outputs, tokens })
}

fn cut(app: &App, model: &Loaded, truncate: Option<bool>) -> Cut {
    Cut { most: model.model.most_tokens(), truncate: truncate.unwrap_or(app.settings.truncate), left: false }
}

/// The logits of texts and pairs.
async fn classify(model: &Arc<Loaded>, inputs: Vec<TextOrPair>, cut: Cut) -> Result<Answer<Vec<Vec<f32>>>, ApiError> {
    let bytes = inputs.iter().map(|TextOrPair(a, b)| a.len() + b.as_ref().map_or(0, String::len)).sum();
    let theirs = Arc::clone(model);
    let sequences = off_the_road(bytes, move || {
        let tokenizer = theirs.model.tokenizer();
        let sequences = inputs.iter().map(|TextOrPair(first, second)| {
            let first = tokenizer.encode(bounded(first, &cut)?)?;
            let Some(second) = second else { return theirs.sequence(first, cut) };
            let second = tokenizer.encode(bounded(second, &cut)?)?;
            let pair = tokenizer.template().pair(&first, &second, cut.most)?;
            if pair.dropped > 0 && !cut.truncate {
                return Err(too_long(cut.most, pair.len() + pair.dropped));
            }
            Ok(pair)
        });
        sequences.collect::<Result<Vec<Features>, ApiError>>()
    });
    let sequences = sequences.await?;
    let dropped = sequences.iter().map(|sequence| sequence.dropped).sum();
    let Ran { outputs, tokens } = run(model, sequences, Read::Sequence).await?;
    Ok(Answer { body: outputs.into_iter().map(|output| output.numbers).collect(), tokens, dropped })
}

/// The entities of one text as JSON.
fn entities(
    model: &Model,
    text: &str,
    words: &[Range<usize>],
    places: &[Option<(usize, usize)>],
    outputs: &[Output],
) -> Value {
    let labels = model.labels();
    let tagged: Vec<Option<(usize, f32)>> = places
        .iter()
        .map(|place| {
            let (window, position) = (*place)?;
            let probabilities = softmax(outputs[window].numbers.chunks_exact(labels.len()).nth(position)?);
            let best =
                (0..labels.len()).reduce(|best, i| if probabilities[i] > probabilities[best] { i } else { best })?;
            Some((best, probabilities[best]))
        })
        .collect();
    let tags: Vec<Option<&str>> = tagged.iter().map(|tag| tag.map(|(label, _)| labels[label].as_str())).collect();
    let found = TagSet::of_labels(&labels).entities(&tags).into_iter().map(|(range, label)| {
        let (start, end) = (words[range.start].start, words[range.end - 1].end);
        let scores: Vec<f32> = tagged[range].iter().flatten().map(|(_, score)| *score).collect();
        let score = scores.iter().sum::<f32>() / scores.len() as f32;
        let place = code_point_offsets(text, &[(start, end)])[0];
        json!({"text": &text[start..end], "start": place.0, "end": place.1, "label": label, "score": score})
    });
    found.collect()
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = logits.iter().map(|x| (x - highest).exp()).collect();
    let total: f32 = powers.iter().sum();
    powers.into_iter().map(|x| x / total).collect()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
