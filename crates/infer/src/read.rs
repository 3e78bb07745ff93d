//! Sequences in, numbers out. This is where results leave the device, for commands and the server alike, and where numbers
//! that are not finite are found: they become an error of their own text, not of its neighbours in the batch.
//!
//! A sequence's numbers do not depend on the others in its batch (ARCHITECTURE.md), so a text gets the same bits alone and
//! among many.

use std::ops::Range;

use henson_models::characters::SENTENCE_START;
use henson_models::{self as models, Batch, Capture, Encoded, Sequence};
use henson_tensor::{Parameters, Pass, RecurrentState, Tape, Tensor};
use henson_text::{Features, SpanBeams, SpanLogits};

use crate::beams::search;
use crate::{InferError, Layers, Model, Pooling, Request, Result};

/// What is read off the encoder's output for a sequence. Legend: S tokens, H hidden, N labels, L layers, A heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// One vector: H for each pooling, side by side.
    Pooled {
        /// How.
        pooling: Vec<Pooling>,
        /// So many tokens at the beginning do not count.
        skip: usize,
    },
    /// A vector for each token: S×H.
    Tokens,
    /// A vector for each token, from chosen layers: S×H, or S×(chosen·H) where they lie side by side.
    Layers(Layers),
    /// The likeliest tokens at these positions: as many ids and probabilities for each.
    Masked {
        /// Within the sequence.
        positions: Vec<usize>,
        /// How many.
        top: usize,
    },
    /// For each token after the first: the logarithm of its probability given those before it, and those of the likeliest
    /// tokens in its place, as many ids. Of a model that reads left to right.
    Next {
        /// How many.
        top: usize,
    },
    /// A sequence head's logits: N.
    Sequence,
    /// A token head's logits: S×N. Where labels are scored together, the logarithms of how likely each is, and as ids those of the
    /// likeliest sequence: S.
    Labels,
    /// Start and end logits: S×2.
    Spans,
    /// The best starts with the best ends of each, and whether there is an answer, of a head that looks for them so: the numbers of
    /// [`SpanBeams`].
    Beams {
        /// Where an answer may start and end, within the sequence.
        shown: Range<usize>,
        /// The classification token, which is what is pointed to where there is none.
        null: usize,
    },
    /// Attention maps: L×A×S×S.
    Attention,
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// Finite, all of them.
    pub numbers: Vec<f32>,
    /// Only for [`Read::Masked`] and [`Read::Next`], and for [`Read::Labels`] where these are scored together.
    pub ids: Vec<u32>,
}

impl Output {
    /// The numbers of [`Read::Spans`], start and end apart.
    pub(crate) fn spans(&self) -> SpanLogits {
        let (start, end) = self.numbers.chunks_exact(2).map(|row| (row[0], row[1])).unzip();
        SpanLogits { start, end }
    }

    /// Those of [`Read::Beams`].
    pub(crate) fn beams(&self) -> SpanBeams {
        SpanBeams::from_numbers(&self.numbers)
    }
}

/// How a sequence goes through the encoder. Those of one kind share a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// To the last layer's output.
    Plain,
    /// To the first token of the last layer alone, which is faster.
    FirstToken,
    /// With the output of every layer.
    HiddenStates,
    /// With attention maps, which cost memory for every sequence.
    AttentionMaps,
    /// To masks, where a second stream predicts them.
    Masks,
}

impl Read {
    /// What is read of a window over a passage by a head with beams; `null` is the place of the classification token.
    pub fn beams(window: &Features, null: usize) -> Self {
        Self::Beams { shown: window.windowed_positions(), null }
    }

    fn way(&self, has_streams: bool) -> Way {
        match self {
            Read::Masked { .. } if has_streams => Way::Masks,
            Read::Pooled { .. } | Read::Tokens | Read::Masked { .. } | Read::Next { .. } => Way::Plain,
            Read::Labels | Read::Spans | Read::Beams { .. } => Way::Plain,
            Read::Sequence => Way::FirstToken,
            Read::Layers(_) => Way::HiddenStates,
            Read::Attention => Way::AttentionMaps,
        }
    }
}

impl Model {
    /// Runs sequences through the model together and reads off each what is asked for. `None` stands for a sequence whose
    /// numbers are not all finite; the others have theirs.
    pub fn read(&self, sequences: &[(&Features, &Read)]) -> Result<Vec<Option<Output>>> {
        let finite = |output: Output| output.numbers.iter().all(|x| x.is_finite()).then_some(output);
        Ok(read(self.network(), self.parameters(), sequences)?.into_iter().map(finite).collect())
    }
}

/// What the recurrent layers of a model ended with, for a text that shall begin there.
#[derive(Clone, Debug, Default)]
pub struct Carried(Vec<RecurrentState>);

impl Model {
    /// [`Model::run`], one sequence after the other, each beginning where the one before it ended, and the first at what is
    /// carried; of recurrent networks.
    pub(crate) fn run_in_turn<A>(&self, request: Request<A>, carried: &mut Carried) -> Result<A> {
        let Request { sequences, finish, .. } = request;
        let mut all = Vec::with_capacity(sequences.len());
        for crate::request::Sequence { features, read, text } in sequences {
            let read = read_from(self.network(), self.parameters(), &[(&features, &read)], Some(&mut carried.0))?;
            let output = read.into_iter().find(|output| output.numbers.iter().all(|x| x.is_finite()));
            all.push((features, output.ok_or(InferError::NotFinite { text })?));
        }
        Ok(finish(self, all))
    }
}

/// [`Model::read`] for a network that is still being trained: what is not finite stays in the outputs.
pub fn read(network: &models::Model, parameters: &Parameters, sequences: &[(&Features, &Read)]) -> Result<Vec<Output>> {
    read_from(network, parameters, sequences, None)
}

/// The same; recurrent layers begin with the states that are carried, and these become what they end with.
fn read_from(
    network: &models::Model,
    parameters: &Parameters,
    sequences: &[(&Features, &Read)],
    mut carried: Option<&mut Vec<RecurrentState>>,
) -> Result<Vec<Output>> {
    let mut outputs = vec![Output::default(); sequences.len()];
    let has_streams = network.config().has_streams();
    for way in [Way::Plain, Way::FirstToken, Way::HiddenStates, Way::AttentionMaps, Way::Masks] {
        let chosen: Vec<usize> = (0..sequences.len()).filter(|i| sequences[*i].1.way(has_streams) == way).collect();
        if chosen.is_empty() {
            continue;
        }
        let inputs: Vec<Sequence<'_>> = chosen
            .iter()
            .map(|i| Sequence { ids: &sequences[*i].0.ids, segments: &sequences[*i].0.segments })
            .collect();
        let reads: Vec<&Read> = chosen.iter().map(|i| sequences[*i].1).collect();
        let masks = masks(&inputs, &reads);
        // From the inputs to what is read: a thread that writes on the same GPU would come between any two of its copies.
        let _turn = parameters.device().turn();
        let (batch, masks) = Batch::with_masks(parameters.device(), network.config(), &inputs, &masks, 0)?;
        let spellings = chosen.iter().map(|i| sequences[*i].0.spellings.as_deref());
        let mut batch = batch.spelled(parameters.device(), network.config(), spellings)?;
        if let Some(states) = &carried {
            batch = batch.continuing(states);
        }
        let mut tape = Tape::new();
        let pass = Pass::inference(&mut tape, parameters);
        let carried = carried.as_deref_mut();
        let read =
            Reader { network, pass, batch: &batch, inputs: &inputs, masks: &masks, carried }.read(way, &reads)?;
        for (i, output) in chosen.into_iter().zip(read) {
            outputs[i] = output;
        }
    }
    Ok(outputs)
}

/// The rows of masks that are read, in the order of the sequences.
fn masks(sequences: &[Sequence<'_>], reads: &[&Read]) -> Vec<u32> {
    let (mut start, mut rows) = (0, Vec::new());
    for (sequence, read) in sequences.iter().zip(reads) {
        if let Read::Masked { positions, .. } = read {
            rows.extend(positions.iter().map(|position| (start + position) as u32));
        }
        start += sequence.ids.len();
    }
    rows
}

struct Reader<'a> {
    network: &'a models::Model,
    pass: Pass<'a>,
    batch: &'a Batch,
    inputs: &'a [Sequence<'a>],
    /// The rows where masks are predicted.
    masks: &'a Tensor,
    /// What recurrent layers end with goes there.
    carried: Option<&'a mut Vec<RecurrentState>>,
}

impl Reader<'_> {
    fn read(mut self, way: Way, reads: &[&Read]) -> Result<Vec<Output>> {
        let network = self.network;
        if way == Way::FirstToken {
            let logits = network.logits(&mut self.pass, self.batch, None)?;
            let labels = logits.tensor().columns().max(1);
            let rows = logits.tensor().to_f32()?;
            return Ok(rows.chunks_exact(labels).map(|row| Output { numbers: row.to_vec(), ids: vec![] }).collect());
        }
        let capture = Capture { hidden_states: way == Way::HiddenStates, attention_maps: way == Way::AttentionMaps };
        let encoded = network.encode(&mut self.pass, self.batch, capture)?;
        if let Some(carried) = &mut self.carried {
            **carried = encoded.states.iter().map(RecurrentState::detached).collect();
        }
        let mut outputs = vec![Output::default(); reads.len()];
        match way {
            Way::HiddenStates => self.layers(reads, &encoded, &mut outputs)?,
            Way::AttentionMaps => self.attention(&encoded, &mut outputs)?,
            Way::Plain | Way::FirstToken => self.last(reads, &encoded, &mut outputs)?,
            Way::Masks => self.masked(reads, &encoded, &mut outputs)?,
        }
        Ok(outputs)
    }

    /// What is read off the last layer.
    fn last(&mut self, reads: &[&Read], encoded: &Encoded, outputs: &mut [Output]) -> Result<()> {
        let network = self.network;
        let hidden = network.config().sizes().hidden_size;
        let only = |wanted: Read| (0..reads.len()).filter(move |i| *reads[*i] == wanted);
        self.pooled(reads, encoded, outputs)?;
        if only(Read::Tokens).next().is_some() {
            let rows = encoded.last.tensor().to_f32()?;
            only(Read::Tokens).for_each(|i| outputs[i].numbers = self.tokens(&rows, hidden, i));
        }
        let of_tokens = || only(Read::Labels).chain(only(Read::Spans));
        if of_tokens().next().is_some() {
            let logits = network.logits_of(&mut self.pass, encoded.last.clone(), &self.batch.layout, None)?;
            let labels = logits.tensor().columns();
            let numbers = match network.crf() {
                None => logits.tensor().to_f32()?,
                Some(crf) => {
                    let layout = &self.batch.layout;
                    let best = self.pass.crf_best(&logits, crf, layout, network.legal_steps())?;
                    of_tokens().for_each(|i| outputs[i].ids = best[self.range(i)].to_vec());
                    let likely = self.pass.crf_probabilities(&logits, crf, layout)?.to_f32()?;
                    likely.into_iter().map(|p| p.max(f32::MIN_POSITIVE).ln()).collect()
                }
            };
            of_tokens().for_each(|i| outputs[i].numbers = self.tokens(&numbers, labels, i));
        }
        self.beams(reads, encoded, outputs)?;
        self.masked(reads, encoded, outputs)?;
        self.next(reads, encoded, outputs)
    }

    /// One vector a sequence. What the device computes, it computes once for all sequences; see `pooling`.
    fn pooled(&mut self, reads: &[&Read], encoded: &Encoded, outputs: &mut [Output]) -> Result<()> {
        let hidden = self.network.config().sizes().hidden_size;
        let mut computed: Vec<(henson_tensor::Pooling, Vec<f32>)> = Vec::new();
        let mut rows: Option<Vec<f32>> = None;
        let words = self.batch.words_of_tokens().transpose()?;
        for (i, read) in reads.iter().enumerate() {
            let Read::Pooled { pooling, skip } = read else { continue };
            for pooling in pooling {
                let vector = match pooling.on_device().filter(|_| *skip == 0 && words.is_none()) {
                    Some(kernel) => {
                        if computed.iter().all(|(known, _)| *known != kernel) {
                            let pooled = self.pass.pool(&encoded.last, &self.batch.layout, kernel)?;
                            computed.push((kernel, pooled.to_vec::<f32>()?));
                        }
                        let pooled = computed.iter().find(|(known, _)| *known == kernel).map(|(_, all)| all);
                        let factor = pooling.factor(self.range(i).len());
                        let vector = pooled.map_or(&[][..], |all| &all[i * hidden..(i + 1) * hidden]);
                        vector.iter().map(|x| factor * x).collect()
                    }
                    None => {
                        let rows = match &rows {
                            Some(rows) => rows,
                            None => rows.insert(encoded.last.tensor().to_f32()?),
                        };
                        match &words {
                            Some(words) => pooling.of_rows(&self.words(rows, (hidden, i), words, *skip), hidden, 0),
                            None => pooling.of_rows(&self.tokens(rows, hidden, i), hidden, *skip),
                        }
                    }
                };
                outputs[i].numbers.extend(vector);
            }
        }
        Ok(())
    }

    /// The part of T×width numbers that belongs to a sequence.
    fn tokens(&self, numbers: &[f32], width: usize, sequence: usize) -> Vec<f32> {
        let range = self.range(sequence);
        numbers[range.start * width..range.end * width].to_vec()
    }

    /// The rows of a sequence whose tokens are bytes, one for each word; without the marks of sentences, where there are others.
    fn words(&self, numbers: &[f32], (width, sequence): (usize, usize), words: &[u32], skip: usize) -> Vec<f32> {
        let (range, ids) = (self.range(sequence), self.inputs[sequence].ids);
        // White space belongs to the word behind it, also to a mark: what a word is, its last token shows.
        let last = |token: &usize| *token + 1 == range.end || words[*token] != words[*token + 1];
        let ends: Vec<usize> = range.clone().filter(last).filter(|token| *token >= range.start + skip).collect();
        let plain = |token: &&usize| ids[**token - range.start] < SENTENCE_START;
        let marks = !ends.iter().any(|token| plain(&token));
        let chosen = ends.iter().filter(|token| marks || plain(token));
        chosen.flat_map(|token| &numbers[token * width..(token + 1) * width]).copied().collect()
    }

    fn range(&self, sequence: usize) -> Range<usize> {
        let offsets = self.batch.layout.offsets();
        offsets[sequence] as usize..offsets[sequence + 1] as usize
    }

    /// Rows of chosen layers, added up or side by side.
    fn layers(&self, reads: &[&Read], encoded: &Encoded, outputs: &mut [Output]) -> Result<()> {
        let config = self.network.config().sizes();
        let hidden = config.hidden_size;
        let mut states: Vec<Option<Vec<f32>>> = vec![None; encoded.hidden_states.len()];
        for (sequence, read) in reads.iter().enumerate() {
            let Read::Layers(layers) = read else { continue };
            let (chosen, factor) = layers.choose(config.num_hidden_layers)?;
            for i in &chosen {
                if states[*i].is_none() {
                    states[*i] = Some(encoded.hidden_states[*i].tensor().to_f32()?);
                }
            }
            let chosen: Vec<&[f32]> = chosen.iter().filter_map(|i| states[*i].as_deref()).collect();
            let rows = &mut outputs[sequence].numbers;
            for token in self.range(sequence) {
                let parts = chosen.iter().map(|state| &state[token * hidden..(token + 1) * hidden]);
                match factor {
                    Some(factor) => {
                        rows.extend((0..hidden).map(|c| factor * parts.clone().map(|part| part[c]).sum::<f32>()));
                    }
                    None => parts.for_each(|part| rows.extend_from_slice(part)),
                }
            }
        }
        Ok(())
    }

    fn attention(&self, encoded: &Encoded, outputs: &mut [Output]) -> Result<()> {
        let heads = self.network.config().sizes().num_attention_heads;
        for layer in &encoded.attention_maps {
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

    fn masked(&mut self, reads: &[&Read], encoded: &Encoded, outputs: &mut [Output]) -> Result<()> {
        if self.masks.shape().elements() == 0 {
            return Ok(());
        }
        let vocabulary = self.network.config().sizes().vocab_size;
        let (last, layout) = (encoded.last.clone(), self.batch.output_layout());
        let logits = self.network.logits_of(&mut self.pass, last, layout, Some(self.masks))?;
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

    /// Answers whose end depends on their start.
    fn beams(&mut self, reads: &[&Read], encoded: &Encoded, outputs: &mut [Output]) -> Result<()> {
        for (i, read) in reads.iter().enumerate() {
            let Read::Beams { shown, null } = read else { continue };
            let rows = self.range(i);
            let found = search(self.network, &mut self.pass, &encoded.last, rows, shown.clone(), *null)?;
            outputs[i].numbers = found.to_numbers();
        }
        Ok(())
    }

    /// What a left-to-right model thought of the tokens that it read.
    fn next(&mut self, reads: &[&Read], encoded: &Encoded, outputs: &mut [Output]) -> Result<()> {
        let vocabulary = self.network.config().sizes().vocab_size;
        for (i, read) in reads.iter().enumerate() {
            let Read::Next { top } = read else { continue };
            let Range { start, end } = self.range(i);
            // A row's logits are about the token after it; after the last there is none.
            let rows: Vec<u32> = (start..end.saturating_sub(1)).map(|row| row as u32).collect();
            let mut targets = self.inputs[i].ids.iter().skip(1);
            for rows in rows.chunks(NEXT_ROWS) {
                let places = Tensor::from_slice(self.pass.device(), [rows.len()], rows)?;
                let (last, layout) = (encoded.last.clone(), &self.batch.layout);
                let logits = self.network.logits_of(&mut self.pass, last, layout, Some(&places))?;
                let (columns, logits) = (logits.tensor().columns(), logits.tensor().to_f32()?);
                for (logits, target) in logits.chunks(columns).zip(targets.by_ref()) {
                    let logits = &logits[..vocabulary];
                    let whole = log_sum_exp(logits);
                    let ids = best(logits, *top);
                    let of = |id: u32| (f64::from(logits[id as usize]) - whole) as f32;
                    outputs[i].numbers.push(of(*target));
                    outputs[i].numbers.extend(ids.iter().map(|id| of(*id)));
                    outputs[i].ids.extend(ids);
                }
            }
        }
        Ok(())
    }
}

/// Rows whose logits are computed at a time for [`Read::Next`]: 51 MB with GPT-2's vocabulary.
const NEXT_ROWS: usize = 256;

pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    most + logits.iter().map(|logit| (f64::from(*logit) - most).exp()).sum::<f64>().ln()
}

/// The most probable tokens of a row, ties by id; what is not a number comes first, so that it is seen.
pub(crate) fn best(row: &[f32], top: usize) -> Vec<u32> {
    let key = |id: u32| if row[id as usize].is_nan() { f32::INFINITY } else { row[id as usize] };
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    let order = |a: &u32, b: &u32| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
    let top = top.min(ids.len());
    if top > 0 && top < ids.len() {
        ids.select_nth_unstable_by(top - 1, order);
    }
    ids.truncate(top);
    ids.sort_by(order);
    ids
}
