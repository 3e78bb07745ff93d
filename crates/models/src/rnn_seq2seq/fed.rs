//! A decoder that is fed: a step reads what an earlier one gave, so that the steps of a sequence cannot be one scan. All sequences take
//! a step together, those with the most tokens first, so that the ones that are left are always the first ones: nothing is padded.
//!
//! Legend: T tokens of B sequences, N of which have a token at a step, W numbers of a token's vector, H hidden.

use henson_tensor::{DType, Layout, Pass, RecurrentState, Result, Tensor, Var};

use super::{Attend, Begin, Feeding, RnnSeq2Seq};

/// What is attended to.
pub(super) struct Source {
    /// Keys and memory of all tokens.
    pub(super) rows: [Var; 2],
    pub(super) layout: Layout,
}

impl Source {
    /// That of some sequences, in this order.
    fn of(&self, pass: &mut Pass<'_>, sequences: &[usize]) -> Result<Self> {
        let offsets = self.layout.offsets();
        let tokens = sequences.iter().flat_map(|i| offsets[*i]..offsets[*i + 1]).collect::<Vec<u32>>();
        let lengths: Vec<usize> = sequences.iter().map(|i| (offsets[*i + 1] - offsets[*i]) as usize).collect();
        let layout = Layout::new(pass.device(), &lengths, 0)?;
        let [keys, memory] = &self.rows;
        Ok(Self { rows: [picked(pass, keys, &tokens)?, picked(pass, memory, &tokens)?], layout })
    }
}

/// The steps of a decoder over the tokens of a layout.
pub(super) struct Steps<'a> {
    pub(super) network: &'a RnnSeq2Seq,
    pub(super) attention: Attend,
    pub(super) layout: &'a Layout,
}

impl Steps<'_> {
    /// What predicts at each token (T×H), from vectors of tokens (T×W); and, but for training, what the sequences end with.
    pub(super) fn write(self, pass: &mut Pass<'_>, x: &Var, begin: Begin, source: Source) -> Result<(Var, Begin)> {
        let order = Order::new(self.layout);
        let numbers: Vec<u32> = self.layout.numbers().to_vec()?;
        let numbers: Vec<u32> = order.sequences.iter().map(|i| numbers[*i]).collect();
        let (b, feeding) = (numbers.len(), self.network.settings.feeding);
        let fed = match begin.fed {
            Some(fed) => fed,
            None => {
                let zeros = Tensor::zeros(pass.device(), [b, self.network.settings.hidden_size], DType::F32)?;
                pass.constant(&zeros)?
            }
        };
        let mut now = Now { states: begin.states, fed, source };
        now = now.of(pass, &order.sequences)?;
        let (mut outputs, mut kept) = (Vec::with_capacity(order.active.len()), Vec::new());
        for (place, n) in order.active.iter().enumerate() {
            if *n < now.source.layout.sequences() {
                now = now.of(pass, &(0..*n).collect::<Vec<usize>>())?;
            }
            let layout = Layout::of_tokens(pass.device(), &numbers[..*n], place as u32)?;
            let token = picked(pass, x, &order.tokens(self.layout, place))?;
            if feeding == Feeding::Context
                && let Some(top) = now.states.last()
            {
                now.fed = self.attend(pass, &top.hidden, &layout, &now.source)?;
            }
            let read = pass.beside(&token, &now.fed)?;
            let (state, states) = self.network.decoder.forward_from(pass, read, &layout, &now.states)?;
            let attended = match feeding {
                Feeding::Context => now.fed,
                Feeding::Output | Feeding::None => self.attend(pass, &state, &layout, &now.source)?,
            };
            let out = self.attention.combined(pass, &attended, &state)?;
            outputs.push(out.clone());
            if !pass.is_training() {
                kept.push(states.clone());
            }
            now = Now { states, fed: out, source: now.source };
        }
        let all = stacked(pass, outputs)?;
        let out = picked(pass, &all, &order.rows_of_tokens(self.layout))?;
        let (ends, mut states) = (order.rows_of_ends(), Vec::new());
        for layer in 0..kept.first().map_or(0, Vec::len) {
            let of_steps = |part: fn(&RecurrentState) -> Option<&Var>| -> Option<Vec<Var>> {
                kept.iter().map(|states| part(&states[layer]).cloned()).collect()
            };
            let (hidden, cell) = (of_steps(|state| Some(&state.hidden)), of_steps(|state| state.cell.as_ref()));
            let mut end = |steps: Vec<Var>| -> Result<Var> {
                let all = stacked(pass, steps)?;
                picked(pass, &all, &ends)
            };
            states.push(RecurrentState {
                hidden: end(hidden.unwrap_or_default())?,
                cell: cell.map(&mut end).transpose()?,
            });
        }
        let keeps = feeding == Feeding::Output && !pass.is_training();
        let fed = if keeps { Some(picked(pass, &all, &ends)?) } else { None };
        Ok((out, Begin { states, fed }))
    }

    fn attend(&self, pass: &mut Pass<'_>, states: &Var, layout: &Layout, source: &Source) -> Result<Var> {
        let [keys, memory] = &source.rows;
        self.attention.attend(pass, (states, layout), [keys, memory], &source.layout)
    }
}

/// What the sequences of a step have.
struct Now {
    states: Vec<RecurrentState>,
    /// N×H.
    fed: Var,
    source: Source,
}

impl Now {
    /// That of some of them, in this order.
    fn of(&self, pass: &mut Pass<'_>, sequences: &[usize]) -> Result<Self> {
        let rows: Vec<u32> = sequences.iter().map(|i| *i as u32).collect();
        let mut states = Vec::with_capacity(self.states.len());
        for RecurrentState { hidden, cell } in &self.states {
            let cell = cell.as_ref().map(|cell| picked(pass, cell, &rows)).transpose()?;
            states.push(RecurrentState { hidden: picked(pass, hidden, &rows)?, cell });
        }
        Ok(Self { states, fed: picked(pass, &self.fed, &rows)?, source: self.source.of(pass, sequences)? })
    }
}

/// The order in which sequences take their steps.
struct Order {
    /// The longest first.
    sequences: Vec<usize>,
    /// The tokens of each, in this order.
    lengths: Vec<usize>,
    /// How many of them have a token at each place.
    active: Vec<usize>,
    /// How many tokens were read before each place.
    before: Vec<u32>,
}

impl Order {
    fn new(layout: &Layout) -> Self {
        let offsets = layout.offsets();
        let length = |i: usize| (offsets[i + 1] - offsets[i]) as usize;
        let mut sequences: Vec<usize> = (0..layout.sequences()).collect();
        sequences.sort_by_key(|i| std::cmp::Reverse(length(*i)));
        let lengths: Vec<usize> = sequences.iter().map(|i| length(*i)).collect();
        let most = lengths.first().copied().unwrap_or(0);
        let active: Vec<usize> = (0..most).map(|place| lengths.partition_point(|length| *length > place)).collect();
        let before = active.iter().scan(0, |sum, n| Some(std::mem::replace(sum, *sum + *n as u32))).collect();
        Self { sequences, lengths, active, before }
    }

    /// The rows of a flat batch that hold the tokens at a place.
    fn tokens(&self, layout: &Layout, place: usize) -> Vec<u32> {
        self.sequences[..self.active[place]].iter().map(|i| layout.offsets()[*i] + place as u32).collect()
    }

    /// Where the tokens of a flat batch are among the rows of all steps, one after the other.
    fn rows_of_tokens(&self, layout: &Layout) -> Vec<u32> {
        let mut rows = vec![0; layout.tokens()];
        for place in 0..self.active.len() {
            for (row, token) in (self.before[place]..).zip(self.tokens(layout, place)) {
                rows[token as usize] = row;
            }
        }
        rows
    }

    /// Where the last token of each sequence is among them, in the order of the batch.
    fn rows_of_ends(&self) -> Vec<u32> {
        let mut rows = vec![0; self.sequences.len()];
        for (rank, (sequence, length)) in (0..).zip(self.sequences.iter().zip(&self.lengths)) {
            rows[*sequence] = self.before[*length - 1] + rank;
        }
        rows
    }
}

fn picked(pass: &mut Pass<'_>, x: &Var, rows: &[u32]) -> Result<Var> {
    let rows = Tensor::from_slice(pass.device(), [rows.len()], rows)?;
    pass.gather(x, &rows)
}

/// The rows of several values one after the other, joined two by two.
fn stacked(pass: &mut Pass<'_>, mut parts: Vec<Var>) -> Result<Var> {
    while parts.len() > 1 {
        let mut joined = Vec::with_capacity(parts.len().div_ceil(2));
        for pair in parts.chunks(2) {
            joined.push(match pair {
                [first, second] => {
                    let (a, b) = (first.tensor().rows() as u32, second.tensor().rows() as u32);
                    let places = [0..a, a..a + b]
                        .map(|range| Tensor::from_slice(pass.device(), [range.len()], &range.collect::<Vec<u32>>()));
                    let [first_places, second_places] = places;
                    pass.join(first, second, [&first_places?, &second_places?])?
                }
                other => other[0].clone(),
            });
        }
        parts = joined;
    }
    Ok(parts.swap_remove(0))
}
