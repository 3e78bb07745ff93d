//! What stands next to a batch for networks that score distances and segments (XLNet): how queries stand to keys, a second stream of
//! queries for tokens that are predicted, and the states of earlier tokens.
//!
//! Legend: T tokens in the flat batch, G of them predicted, M earlier tokens, H hidden, L layers.

use henson_tensor::{
    Device, Layout, RecurrentState, Relations, Result, Sinusoids, Tensor, TensorError, UNSEEN, Var, XlRelations,
};

use crate::{Batch, InputError, Sequence};

/// In which order the tokens of a sequence are predicted, and which of them are.
#[derive(Clone, Copy, Debug)]
pub struct Permutation<'a> {
    /// For each token 0 where all others see it, otherwise a number from 1: tokens with higher numbers see it.
    pub orders: &'a [u32],
    /// Where the tokens stand that are predicted. Their orders are not 0.
    pub targets: &'a [u32],
}

/// The states of earlier tokens that every layer sees in front of a sequence's own. They are numbers, and nothing has a gradient of
/// them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Where each sequence's tokens begin, and the end of the last.
    offsets: Vec<usize>,
    /// The input of each layer: L of M×H.
    states: Vec<Tensor>,
}

/// How much of a sequence is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySettings {
    /// `mem_len`: tokens that are kept, the latest; all without it.
    pub most: Option<usize>,
    /// `reuse_len`: tokens at the beginning of a sequence that are kept, where the rest is read again; all without it.
    pub reused: Option<usize>,
}

impl Memory {
    /// States from elsewhere: the input of each layer, one row of H numbers for each of so many tokens of each sequence.
    pub fn new(device: &Device, lengths: &[usize], states: &[Vec<f32>]) -> Result<Self> {
        let mut offsets = vec![0];
        lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + length));
        let rows = offsets[lengths.len()];
        let mut layers = Vec::new();
        for numbers in states {
            let width = numbers.len() / rows.max(1);
            layers.push(Tensor::from_slice(device, [rows, width], numbers)?);
        }
        Ok(Self { offsets, states: layers })
    }

    /// What remains of a batch and of its own memory, from the input of every layer: the hidden states of
    /// [`Capture`](crate::Capture), of which the last is none.
    pub fn after(device: &Device, batch: &Batch, hidden_states: &[Var], settings: MemorySettings) -> Result<Self> {
        let Some(streams) = &batch.streams else {
            let why = "the network keeps no states of earlier tokens";
            return Err(TensorError::Unsupported { operation: "memory", why });
        };
        let old = streams.memory.as_ref().map(|(memory, _)| memory);
        let rows = streams.relations.queries().offsets();
        // For each sequence, the earlier tokens that stay and its own.
        let mut kept = Vec::new();
        let mut offsets = vec![0];
        for (i, ends) in batch.layout.offsets().windows(2).enumerate() {
            let length = (ends[1] - ends[0]) as usize;
            let own = settings.reused.filter(|reused| *reused > 0).map_or(length, |reused| reused.min(length));
            let before = old.map_or(0..0, |old| old.offsets[i]..old.offsets[i + 1]);
            let all = before.len() + own;
            let dropped = all - settings.most.filter(|most| *most > 0).map_or(all, |most| most.min(all));
            let from = (before.start + dropped).min(before.end);
            let first = rows[i] as usize;
            kept.push((from..before.end, first + dropped.saturating_sub(before.len())..first + own));
            offsets.push(offsets[i] + all - dropped);
        }
        // Where each row of the old memory, and of this batch, goes.
        let mut places =
            [old.map_or(0, |old| old.offsets[old.offsets.len() - 1]), streams.relations.queries().tokens()]
                .map(|rows| vec![Device::NOWHERE; rows]);
        let mut next = 0;
        for (from, to) in kept {
            for (places, rows) in places.iter_mut().zip([from, to]) {
                for place in &mut places[rows] {
                    *place = next;
                    next += 1;
                }
            }
        }
        let [of_old, of_own] = places;
        let mut states = Vec::new();
        for (layer, x) in hidden_states[..hidden_states.len().saturating_sub(1)].iter().enumerate() {
            let mut parts = vec![(x.tensor(), of_own.clone())];
            parts.extend(old.map(|old| (&old.states[layer], of_old.clone())));
            states.push(Tensor::of_rows(device, [next as usize, x.tensor().columns()], &parts)?);
        }
        Ok(Self { offsets, states })
    }

    /// From states that were kept ([`Memory::to_states`]), of so many sequences with equally many tokens each.
    pub fn of_states(states: &[RecurrentState], sequences: usize) -> Result<Self> {
        let rows = states.first().map_or(0, |state| state.hidden.tensor().shape().sizes()[0]);
        let Some(length) = rows.checked_div(sequences).filter(|length| length * sequences == rows) else {
            let why = "the states that were kept are not of as many sequences";
            return Err(TensorError::Unsupported { operation: "memory", why });
        };
        let offsets = (0..=sequences).map(|sequence| sequence * length).collect();
        Ok(Self { offsets, states: states.iter().map(|state| state.hidden.tensor().clone()).collect() })
    }

    /// What is carried to the next batch: the input of each layer, a row for each token.
    pub fn to_states(&self) -> Vec<RecurrentState> {
        self.states.iter().cloned().map(RecurrentState::of_tensor).collect()
    }

    /// How many tokens of a sequence it has.
    pub fn length(&self, sequence: usize) -> usize {
        self.offsets[sequence + 1] - self.offsets[sequence]
    }

    /// The input of a layer, M×H.
    pub(crate) fn state(&self, layer: usize) -> Result<&Tensor> {
        let why = "the memory is one of fewer layers";
        self.states.get(layer).ok_or(TensorError::Unsupported { operation: "memory", why })
    }
}

/// What a batch has next to its tokens.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    pub(crate) relations: XlRelations,
    /// The distances from 0 on within the longest sequence's keys. An input, since what a pass computes with has its size.
    distances: Tensor,
    pub(crate) queries: Option<Queries>,
    /// With the rows of earlier and of other tokens among the keys.
    pub(crate) memory: Option<(Memory, [Tensor; 2])>,
}

/// A second stream: behind a sequence's own tokens, those that are predicted once more.
#[derive(Clone, Debug)]
pub(crate) struct Queries {
    /// T: the rows of tokens.
    pub(crate) content: Tensor,
    /// G: the rows of what is predicted.
    pub(crate) predicted: Tensor,
    /// G zeros: all start alike.
    pub(crate) zeros: Tensor,
}

/// Numbers for all queries and keys.
#[derive(Default)]
struct Numbers {
    places: Vec<u32>,
    segments: [Vec<u32>; 2],
    orders: [Vec<u32>; 2],
    /// The rows of content, and of what is predicted, among queries.
    rows: [Vec<u32>; 2],
    /// The rows of earlier tokens, and of queries, among keys.
    key_rows: [Vec<u32>; 2],
    lengths: [Vec<usize>; 2],
}

impl Numbers {
    fn add(&mut self, sequence: &Sequence<'_>, permutation: Option<&Permutation<'_>>, before: usize) {
        let (targets, orders) = permutation.map_or((&[][..], None), |order| (order.targets, Some(order.orders)));
        let (content, keys) = (self.places.len(), self.orders[1].len());
        let order = |at: usize| orders.map_or(0, |orders| orders[at]);
        // Earlier tokens are of the first segment, and everybody sees them.
        self.segments[1].resize(keys + before, 0);
        self.orders[1].resize(keys + before, 0);
        let all = (0..sequence.ids.len()).map(|at| (at, order(at)));
        for (at, order_as_key) in all.chain(targets.iter().map(|target| (*target as usize, UNSEEN))) {
            let segment = sequence.segments[at];
            self.places.push((before + at) as u32);
            self.segments.iter_mut().for_each(|segments| segments.push(segment));
            self.orders[0].push(order(at).max(1));
            self.orders[1].push(order_as_key);
        }
        let queries = self.places.len() - content;
        let own = sequence.ids.len();
        self.rows[0].extend((content..content + own).map(|row| row as u32));
        self.rows[1].extend((content + own..content + queries).map(|row| row as u32));
        self.key_rows[0].extend((keys..keys + before).map(|row| row as u32));
        self.key_rows[1].extend((keys + before..keys + before + queries).map(|row| row as u32));
        self.lengths[0].push(queries);
        self.lengths[1].push(before + queries);
    }
}

impl Streams {
    /// The keys of the longest sequence.
    pub(crate) fn longest(&self) -> usize {
        self.distances.shape().elements()
    }

    /// `layout` is that of the sequences' own tokens.
    pub(crate) fn new(
        device: &Device,
        sequences: &[Sequence<'_>],
        permutations: Option<&[Permutation<'_>]>,
        memory: Option<&Memory>,
        (layout, first_number): (&Layout, u32),
    ) -> std::result::Result<Self, InputError> {
        if let Some(permutations) = permutations {
            check(sequences, permutations)?;
        }
        if let Some(memory) = memory.filter(|memory| memory.offsets.len() != sequences.len() + 1) {
            let (sequences, remembered) = (sequences.len(), memory.offsets.len() - 1);
            return Err(InputError::Memory { sequences, remembered });
        }
        let mut all = Numbers::default();
        for (i, sequence) in sequences.iter().enumerate() {
            let permutation = permutations.map(|permutations| &permutations[i]);
            all.add(sequence, permutation, memory.map_or(0, |memory| memory.length(i)));
        }
        let queries = match permutations {
            Some(_) => Layout::new(device, &all.lengths[0], first_number)?,
            None => layout.clone(),
        };
        let keys = match memory {
            Some(_) => Layout::new(device, &all.lengths[1], first_number)?,
            None => queries.clone(),
        };
        let relations = Relations {
            places: permutations.map(|_| &all.places[..]),
            segments: Some(all.segments.each_ref().map(|segments| &segments[..])),
            orders: permutations.map(|_| all.orders.each_ref().map(|orders| &orders[..])),
        };
        let tensor = |numbers: &[u32]| Tensor::from_slice(device, [numbers.len()], numbers);
        let longest = all.lengths[1].iter().copied().max().unwrap_or(0);
        Ok(Self {
            relations: XlRelations::new(device, (&queries, &keys), relations)?,
            distances: tensor(&(0..Sinusoids::distances_for(device, longest) as u32).collect::<Vec<u32>>())?,
            queries: match permutations {
                Some(_) => Some(Queries {
                    content: tensor(&all.rows[0])?,
                    predicted: tensor(&all.rows[1])?,
                    zeros: tensor(&vec![0; all.rows[1].len()])?,
                }),
                None => None,
            },
            memory: match memory {
                Some(memory) => {
                    let [earlier, own] = &all.key_rows;
                    Some((memory.clone(), [tensor(earlier)?, tensor(own)?]))
                }
                None => None,
            },
        })
    }
}

fn check(sequences: &[Sequence<'_>], permutations: &[Permutation<'_>]) -> std::result::Result<(), InputError> {
    let wrong = |sequence: usize, problem: String| Err(InputError::Permutation { sequence, problem });
    if sequences.len() != permutations.len() {
        return wrong(0, format!("there are {} sequences and {} orders", sequences.len(), permutations.len()));
    }
    for (i, (sequence, Permutation { orders, targets })) in sequences.iter().zip(permutations).enumerate() {
        let length = sequence.ids.len();
        if orders.len() != length {
            return wrong(i, format!("{length} tokens but {} orders", orders.len()));
        }
        if let Some(target) = targets.iter().find(|target| **target as usize >= length) {
            return wrong(i, format!("token {target} of {length} is predicted"));
        }
        if let Some(target) = targets.iter().find(|target| [0, UNSEEN].contains(&orders[**target as usize])) {
            return wrong(i, format!("token {target} is predicted and sees itself: its order must be 1 or more"));
        }
    }
    Ok(())
}
