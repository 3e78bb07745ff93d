//! A look inside, for the page: what heads attend to, and how a word's vectors change with its context.

use henson_infer::{AttentionMaps, Input, Request, dot, join_windows, normalise};
use henson_text::{Features, code_point_offsets, split_words};
use serde_json::{Value, json};

use crate::app::{Answer, Call};
use crate::error::{ApiError, Kind};
use crate::models::Cut;
use crate::routes::{check_count, named_tokens, off_the_road};
use crate::wire;

/// Attention maps grow with the square of the text, and nobody looks at larger ones.
const MOST_TOKENS: usize = 128;

/// The tokens of a text, and L×A maps of S×S.
pub(crate) async fn attention(call: Call<wire::AttentionRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { model, body: wire::AttentionRequest { inputs: text, .. }, .. } = call;
    if text.is_empty() {
        return Err(ApiError::new(Kind::Empty, "`inputs` is empty"));
    }
    let most = MOST_TOKENS.min(model.model.most_tokens());
    let text = Cut { field: "inputs", most, truncate: true, left: false }.bounded(&text)?;
    let answer = model.run(model.model.prepare_attention(Input::One(text), Some(most))?).await?;
    Ok(answer.map(|maps| {
        let tokens = named_tokens(&model, text, &maps.sequence.ids, &maps.sequence.offsets);
        let layers = model.model.config().model.sizes().num_hidden_layers;
        json!({"tokens": tokens, "layers": layers, "heads": maps.heads, "attention": rounded(&maps)})
    }))
}

/// Four digits are more than a picture shows, and a third of the bytes.
fn rounded(maps: &AttentionMaps) -> Value {
    let size = maps.sequence.len();
    let round = |x: &f32| json!((f64::from(*x) * 1e4).round() / 1e4);
    let map =
        |map: &[f32]| map.chunks_exact(size).map(|row| row.iter().map(round).collect::<Value>()).collect::<Value>();
    maps.layers().map(|layer| layer.chunks_exact(size * size).map(map).collect::<Value>()).collect()
}

/// Every use of a word, and the cosines between their vectors in the last layer.
pub(crate) async fn neighbours(call: Call<wire::NeighboursRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { app, model, body: wire::NeighboursRequest { word, inputs, .. } } = call;
    check_count(&app, inputs.len(), "inputs")?;
    let wanted = word.trim().to_lowercase();
    if wanted.is_empty() {
        return Err(ApiError::new(Kind::Empty, "`word` is empty"));
    }
    let theirs = std::sync::Arc::clone(&model);
    let prepared = off_the_road(inputs.iter().map(String::len).sum(), move || {
        let cut = Cut { field: "inputs", most: theirs.model.most_tokens(), truncate: true, left: false };
        let (mut uses, mut requests) = (Vec::new(), Vec::new());
        for (number, text) in inputs.iter().enumerate() {
            let text = cut.bounded(text)?;
            let request = theirs.model.prepare_tokens(&theirs.model.tokenizer().encode(text)?, None)?;
            request.sequences.iter().for_each(|sequence| uses.extend(find(number, text, &sequence.features, &wanted)));
            requests.push(request);
        }
        Ok((uses, Request::all(requests)))
    });
    let (uses, request) = prepared.await?;
    if uses.is_empty() {
        let message = format!("none of the texts has the word {word:?}");
        return Err(ApiError::new(Kind::Validation, message));
    }
    // Nothing is said of what is cut off: it cannot be compared.
    let Answer { body: rows, tokens, .. } = model.run(request).await?;
    let hidden = model.model.config().model.sizes().hidden_size;
    let vectors: Vec<Vec<f32>> =
        uses.iter().map(|found| unit_mean(&rows[found.text], hidden, &found.positions)).collect();
    let similarity: Vec<Vec<f32>> = vectors.iter().map(|a| vectors.iter().map(|b| dot(a, b)).collect()).collect();
    let nearest = |i: usize| {
        let mut others: Vec<usize> = (0..uses.len()).filter(|other| *other != i).collect();
        others.sort_by(|a, b| similarity[i][*b].total_cmp(&similarity[i][*a]));
        others
    };
    let nearest: Vec<Vec<usize>> = (0..uses.len()).map(nearest).collect();
    let uses: Vec<Value> = uses.iter().map(|u| json!({"text": u.text, "start": u.start, "end": u.end})).collect();
    let body = json!({"uses": uses, "similarity": similarity, "nearest": nearest});
    Ok(Answer { body, tokens, dropped: 0 })
}

/// A use of a word: where it is in characters, and at which positions of the sequence.
struct Use {
    text: usize,
    start: usize,
    end: usize,
    positions: Vec<usize>,
}

fn find(number: usize, text: &str, features: &Features, wanted: &str) -> Vec<Use> {
    let words = split_words(text).into_iter().filter(|word| text[word.clone()].to_lowercase() == wanted);
    let uses = words.filter_map(|word| {
        let touches = |place: &Option<(usize, usize)>| place.is_some_and(|(s, e)| s < word.end && e > word.start);
        let positions: Vec<usize> = (0..features.len()).filter(|i| touches(&features.offsets[*i])).collect();
        let (start, end) = code_point_offsets(text, &[(word.start, word.end)])[0];
        // What was cut off has no positions.
        (!positions.is_empty()).then_some(Use { text: number, start, end, positions })
    });
    uses.collect()
}

/// The mean of some rows, with length 1.
fn unit_mean(rows: &[f32], width: usize, positions: &[usize]) -> Vec<f32> {
    let rows = positions.iter().map(|position| (1, rows[position * width..(position + 1) * width].to_vec()));
    let mut mean = join_windows(rows);
    normalise(&mut mean);
    mean
}
