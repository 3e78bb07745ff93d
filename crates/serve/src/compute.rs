//! One flat batch of sequences from any number of requests through the model, whatever each wants to read off it.
//!
//! A sequence's numbers do not depend on its company (ARCHITECTURE.md), so a request gets the same bits alone and in a
//! crowd. They are those of `henson_infer`, which has the same forward.

use std::ops::Range;

use henson_infer::{InferError, Model, Pooling};
use henson_models::{Batch, Capture, Encoded, Sequence};
use henson_tensor::{Pass, Tape, Tensor};
use henson_text::Features;

/// A sequence, and what is wanted of it.
pub(crate) struct Task {
    pub(crate) features: Features,
    pub(crate) read: Read,
}

/// What is read off the encoder's output for a sequence. Legend: S tokens, H hidden, N labels, L layers, A heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// One vector: H.
    Pooled(Pooling),
    /// A vector for each token: S×H.
    Tokens,
    /// The likeliest tokens at these positions: as many ids and probabilities for each.
    Masked {
        /// Within the sequence.
        positions: Vec<usize>,
        /// How many.
        top: usize,
    },
    /// A sequence head's logits: N.
    Sequence,
    /// A token head's logits: S×N.
    Labels,
    /// Start and end logits: S×2.
    Spans,
    /// Attention maps: L×A×S×S.
    Attention,
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Output {
    pub(crate) numbers: Vec<f32>,
    /// Only for [`Read::Masked`].
    pub(crate) ids: Vec<u32>,
}

/// Runs all tasks in one batch (those that want attention maps in one of their own: maps cost memory for every sequence).
pub(crate) fn run(model: &Model, tasks: &[&Task]) -> Result<Vec<Output>, InferError> {
    let mut outputs = vec![Output::default(); tasks.len()];
    for attention_maps in [false, true] {
        let chosen: Vec<usize> =
            (0..tasks.len()).filter(|i| (tasks[*i].read == Read::Attention) == attention_maps).collect();
        if chosen.is_empty() {
            continue;
        }
        let sequences: Vec<Sequence<'_>> = chosen
            .iter()
            .map(|i| Sequence { ids: &tasks[*i].features.ids, segments: &tasks[*i].features.segments })
            .collect();
        let batch = Batch::new(model.parameters().device(), model.bert().config(), &sequences, 0)?;
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, model.parameters());
        let encoded = model.bert().encode(&mut pass, &batch, Capture { hidden_states: false, attention_maps })?;
        let mut reader = Reader { model, pass, batch: &batch, encoded: &encoded };
        let reads: Vec<&Read> = chosen.iter().map(|i| &tasks[*i].read).collect();
        for (i, output) in chosen.iter().zip(reader.all(&reads)?) {
            outputs[*i] = output;
        }
    }
    Ok(outputs)
}

struct Reader<'a> {
    model: &'a Model,
    pass: Pass<'a>,
    batch: &'a Batch,
    encoded: &'a Encoded,
}

impl Reader<'_> {
    fn all(&mut self, reads: &[&Read]) -> Result<Vec<Output>, InferError> {
        let mut outputs = vec![Output::default(); reads.len()];
        let wanted = |wanted: fn(&Read) -> bool| reads.iter().any(|read| wanted(read));
        let hidden = self.model.bert().config().hidden_size;
        let all: Vec<usize> = (0..reads.len()).collect();
        let only = |wanted: fn(&Read) -> bool| all.iter().copied().filter(move |i| wanted(reads[*i]));
        for pooling in [Pooling::Mean, Pooling::First, Pooling::Max] {
            let members: Vec<usize> = all.iter().copied().filter(|i| *reads[*i] == Read::Pooled(pooling)).collect();
            if !members.is_empty() {
                let pooled = self.pass.pool(&self.encoded.last, &self.batch.layout, pooling)?.to_vec::<f32>()?;
                for i in members {
                    outputs[i].numbers = pooled[i * hidden..(i + 1) * hidden].to_vec();
                }
            }
        }
        if wanted(|read| *read == Read::Tokens) {
            let rows = self.encoded.last.tensor().to_f32()?;
            only(|read| *read == Read::Tokens).for_each(|i| outputs[i].numbers = self.tokens(&rows, hidden, i));
        }
        if wanted(|read| *read == Read::Sequence) {
            let logits = self.model.bert().sequence_logits(&mut self.pass, &self.encoded.last, &self.batch.layout)?;
            let labels = logits.tensor().columns();
            let logits = logits.tensor().to_f32()?;
            only(|read| *read == Read::Sequence)
                .for_each(|i| outputs[i].numbers = logits[i * labels..(i + 1) * labels].to_vec());
        }
        if wanted(|read| *read == Read::Labels) {
            let last = self.encoded.last.clone();
            let logits = self.model.bert().token_logits(&mut self.pass, last, &self.batch.layout)?;
            let labels = logits.tensor().columns();
            let logits = logits.tensor().to_f32()?;
            only(|read| *read == Read::Labels).for_each(|i| outputs[i].numbers = self.tokens(&logits, labels, i));
        }
        if wanted(|read| *read == Read::Spans) {
            let logits = self.model.bert().span_logits(&mut self.pass, &self.encoded.last)?.tensor().to_f32()?;
            only(|read| *read == Read::Spans).for_each(|i| outputs[i].numbers = self.tokens(&logits, 2, i));
        }
        if wanted(|read| *read == Read::Attention) {
            self.attention(&mut outputs)?;
        }
        self.masked(reads, &mut outputs)?;
        Ok(outputs)
    }

    /// The part of T×width numbers that belongs to a sequence.
    fn tokens(&self, numbers: &[f32], width: usize, sequence: usize) -> Vec<f32> {
        let range = self.range(sequence);
        numbers[range.start * width..range.end * width].to_vec()
    }

    fn range(&self, sequence: usize) -> Range<usize> {
        let offsets = self.batch.layout.offsets();
        offsets[sequence] as usize..offsets[sequence + 1] as usize
    }

    fn attention(&self, outputs: &mut [Output]) -> Result<(), InferError> {
        let heads = self.model.bert().config().num_attention_heads;
        for layer in &self.encoded.attention_maps {
            let maps = layer.to_f32()?;
            let mut at = 0;
            for (sequence, output) in outputs.iter_mut().enumerate() {
                let numbers = heads * self.range(sequence).len().pow(2);
                output.numbers.extend_from_slice(&maps[at..at + numbers]);
                at += numbers;
            }
        }
        Ok(())
    }

    fn masked(&mut self, reads: &[&Read], outputs: &mut [Output]) -> Result<(), InferError> {
        let mut rows: Vec<u32> = Vec::new();
        for (i, read) in reads.iter().enumerate() {
            if let Read::Masked { positions, .. } = read {
                rows.extend(positions.iter().map(|position| (self.range(i).start + position) as u32));
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        let rows = Tensor::from_slice(self.pass.device(), [rows.len()], &rows)?;
        let vocabulary = self.model.bert().config().vocab_size;
        let logits = self.model.bert().masked_logits(&mut self.pass, &self.encoded.last, &rows)?;
        let probabilities = self.pass.softmax(&logits, vocabulary)?.to_vec::<f32>()?;
        let mut rows = probabilities.chunks(vocabulary);
        for (read, output) in reads.iter().zip(outputs) {
            let Read::Masked { positions, top } = read else { continue };
            for row in rows.by_ref().take(positions.len()) {
                let ids = best(row, *top);
                output.numbers.extend(ids.iter().map(|id| row[*id as usize]));
                output.ids.extend(ids);
            }
        }
        Ok(())
    }
}

/// The most probable tokens of a row, ties by id.
fn best(row: &[f32], top: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    let order = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
    let top = top.min(ids.len());
    if top > 0 && top < ids.len() {
        ids.select_nth_unstable_by(top - 1, order);
    }
    ids.truncate(top);
    ids.sort_by(order);
    ids
}
