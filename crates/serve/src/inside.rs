//! A look inside, for the page: what heads attend to, and how a word's vectors change with its context.

use henson_infer::{Read, join_windows, normalise};
use henson_text::{Features, code_point_offsets, split_words};
use serde_json::{Value, json};

use crate::app::{Answer, Call};
use crate::error::{ApiError, Kind};
use crate::models::Cut;
use crate::queue::Sequence;
use crate::routes::{bounded, check_count, named_tokens, off_the_road};
use crate::wire;

/// Attention maps grow with the square of the text, and nobody looks at larger ones.
const MOST_TOKENS: usize = 128;

/// The tokens of a text, and L×A maps of S×S.
pub(crate) async fn attention(call: Call<wire::AttentionRequest>) -> Result<Answer<Value>, ApiError> {
    let Call { model, body: wire::AttentionRequest { inputs: text, .. }, .. } = call;
    if text.is_empty() {
        return Err(ApiError::new(Kind::Empty, "`inputs` is empty"));
    }
    let cut = Cut { field: "inputs", most: MOST_TOKENS.min(model.model.most_tokens()), truncate: true, left: false };
    let text = bounded(&text, &cut)?.to_owned();
    let pieces = model.model.tokenizer().encode(&text)?;
    let features = model.sequence(pieces, cut)?;
    let (size, dropped) = (features.len(), features.dropped);
    let tokens = named_tokens(&model, &text, &features.ids, &features.offsets);
    let outputs = model.run(Sequence::of_texts([vec![features]], &Read::Attention)).await?;
    let sizes = model.model.config().model.sizes();
    let (layers, heads) = (sizes.num_hidden_layers, sizes.num_attention_heads);
    let numbers = outputs.first().map(|output| output.numbers.as_slice()).unwrap_or_default();
    let rows: Vec<&[f32]> = numbers.chunks(size).collect();
    let maps: Vec<&[&[f32]]> = rows.chunks(size).collect();
    let attention: Vec<&[&[&[f32]]]> = maps.chunks(heads).collect();
    let body = json!({"tokens": tokens, "layers": layers, "heads": heads, "attention": rounded(&attention)});
    Ok(Answer { body, tokens: size, dropped })
}

/// Four digits are more than a picture shows, and a third of the bytes.
fn rounded(attention: &[&[&[&[f32]]]]) -> Value {
    let round = |x: f32| (f64::from(x) * 1e4).round() / 1e4;
    let row = |row: &[f32]| row.iter().map(|x| json!(round(*x))).collect::<Value>();
    let rows = |map: &[&[f32]]| map.iter().map(|numbers| row(numbers)).collect::<Value>();
    attention.iter().map(|layer| layer.iter().map(|map| rows(map)).collect::<Value>()).collect()
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
    let texts = off_the_road(inputs.iter().map(String::len).sum(), move || {
        let cut = Cut { field: "inputs", most: theirs.model.most_tokens(), truncate: true, left: false };
        let texts = inputs.into_iter().map(|text| {
            let text = bounded(&text, &cut)?.to_owned();
            let features = theirs.sequence(theirs.model.tokenizer().encode(&text)?, cut)?;
            Ok((text, features))
        });
        texts.collect::<Result<Vec<_>, ApiError>>()
    });
    let texts = texts.await?;
    let mut uses: Vec<Use> = Vec::new();
    for (number, (text, features)) in texts.iter().enumerate() {
        uses.extend(find(number, text, features, &wanted));
    }
    if uses.is_empty() {
        let message = format!("none of the texts has the word {word:?}");
        return Err(ApiError::new(Kind::Validation, message));
    }
    let tokens = texts.iter().map(|(_, features)| features.len()).sum();
    let tasks = Sequence::of_texts(texts.into_iter().map(|(_, features)| vec![features]), &Read::Tokens);
    let outputs = model.run(tasks).await?;
    let hidden = model.model.config().model.sizes().hidden_size;
    let vectors: Vec<Vec<f32>> =
        uses.iter().map(|found| unit_mean(&outputs[found.text].numbers, hidden, &found.positions)).collect();
    let cosine = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    let similarity: Vec<Vec<f32>> = vectors.iter().map(|a| vectors.iter().map(|b| cosine(a, b)).collect()).collect();
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
