//! What goes into a model: token sequences, checked against its tables, as one flat stream.

use henson_tensor::{Device, Layout, RecurrentState, RelativePositions, Tensor, TensorError};

use crate::characters::{WordStream, Words, spell};
use crate::config::Recurrence;
use crate::streams::{Memory, Permutation, Streams};
use crate::{ModelConfig, TargetReading};

/// One sequence of tokens.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Piece ids, with `[CLS]` and `[SEP]`.
    pub ids: &'a [u32],
    /// 0 for sentence A, 1 for sentence B; as many as ids.
    pub segments: &'a [u32],
}

/// A sequence does not fit the model.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// Ids and segments differ in number.
    #[error("sequence {sequence}: {ids} ids but {segments} segments")]
    Lengths {
        /// Its number in the batch.
        sequence: usize,
        /// How many ids.
        ids: usize,
        /// How many segments.
        segments: usize,
    },
    /// More tokens than the model has positions for.
    #[error("sequence {sequence} has {got} tokens, the model takes {most}: cut it or divide it into windows")]
    TooLong {
        /// Its number in the batch.
        sequence: usize,
        /// Its tokens.
        got: usize,
        /// The model's positions.
        most: usize,
    },
    /// An id that the vocabulary does not have.
    #[error("sequence {sequence}: token id {got} is not in the model's vocabulary of {end}; is this its tokenizer?")]
    Id {
        /// Its number in the batch.
        sequence: usize,
        /// The id.
        got: u32,
        /// The vocabulary's size.
        end: usize,
    },
    /// A segment that the model does not have.
    #[error("sequence {sequence}: segment {got} is not one of the model's {end}")]
    Segment {
        /// Its number in the batch.
        sequence: usize,
        /// The segment.
        got: u32,
        /// How many there are.
        end: usize,
    },
    /// Targets for a model that writes none, or not one for each source.
    #[error(
        "{sources} sources with {targets} targets: an encoder-decoder and a model that reads left to right take one for each, and \
         no other model takes any"
    )]
    Targets {
        /// How many sources.
        sources: usize,
        /// How many targets.
        targets: usize,
    },
    /// An order of prediction that does not fit.
    #[error("sequence {sequence}: {problem}")]
    Permutation {
        /// Its number in the batch.
        sequence: usize,
        /// What is wrong.
        problem: String,
    },
    /// Orders of prediction, or a memory, for a model that has neither.
    #[error(
        "a {0} predicts tokens where they stand, and remembers none: neither orders nor a memory belong to its batches"
    )]
    NoStreams(String),
    /// Sequences in two directions for a model that reads in one, or in both at once.
    #[error("a {0} does not read words in two directions: only elmo does")]
    NoDirections(String),
    /// The texts of words are missing, or not one for each token.
    #[error(
        "sequence {sequence}: the model reads the characters of words, and the texts of its {tokens} tokens are not known: give texts \
         or words, not token ids"
    )]
    Spelling {
        /// Its number in the batch.
        sequence: usize,
        /// Its tokens.
        tokens: usize,
    },
    /// The memory of other sequences.
    #[error("a batch of {sequences} sequences with the memory of {remembered}")]
    Memory {
        /// How many sequences.
        sequences: usize,
        /// How many are remembered.
        remembered: usize,
    },
    /// The batch could not be laid out.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// A flat batch on a device.
#[derive(Clone, Debug)]
pub struct Batch {
    /// T piece ids.
    pub ids: Tensor,
    /// T segments.
    pub segments: Tensor,
    /// How the T tokens are divided into B sequences.
    pub layout: Layout,
    /// Where the network has a table of relative positions, the rows that the sequences need.
    pub relative: Option<RelativePositions>,
    /// Of an encoder-decoder, what the decoder reads: as many sequences. The network's output then belongs to its tokens.
    pub target: Option<Box<Batch>>,
    /// What a network that scores distances and segments reads besides.
    pub(crate) streams: Option<Streams>,
    /// Whether that is the source once more, because there is no target; what then becomes of it is the network's choice.
    pub target_is_source: bool,
    /// Of a network that reads words as characters, the words.
    pub(crate) words: Option<WordStream>,
    /// Of a network that reads whole words and their characters, the characters.
    pub(crate) spelled: Option<Words>,
    /// What recurrent layers begin with: [`Encoded::states`](crate::Encoded) of the same sequences' earlier parts; none: zeros.
    pub states: Vec<RecurrentState>,
    /// Of two networks that read words in opposite directions, which words are whose, where each reads sequences of its own.
    pub(crate) apart: Option<Apart>,
}

/// The words of two networks, first those of the network that reads forwards.
#[derive(Clone, Debug)]
pub(crate) struct Apart {
    /// Their places among all words.
    pub(crate) places: [Tensor; 2],
    /// How they are divided into sequences.
    pub(crate) layouts: [Layout; 2],
}

impl Batch {
    /// The batch as the source of what a decoder reads.
    pub fn with_target(self, target: Batch) -> Self {
        Self { target: Some(Box::new(target)), target_is_source: false, ..self }
    }

    /// How the tokens are divided that the network's output belongs to.
    pub fn output_layout(&self) -> &Layout {
        match (&self.target, &self.streams) {
            (Some(target), _) => &target.layout,
            (None, Some(streams)) => streams.relations.queries(),
            (None, None) => &self.layout,
        }
    }

    /// Where a second stream predicts tokens, its rows in the network's output, in the order of the targets.
    pub fn predicted(&self) -> Option<&Tensor> {
        self.streams.as_ref()?.queries.as_ref().map(|queries| &queries.predicted)
    }

    /// Where tokens are the bytes of words: which word each of the T tokens is a part of. All tokens of a word have its vector.
    pub fn words_of_tokens(&self) -> Option<Result<Vec<u32>, TensorError>> {
        self.words.as_ref().map(|words| words.of_tokens.to_vec())
    }

    /// The same with recurrent layers that begin where others ended: sequence i continues what sequence i was.
    pub fn continuing(self, states: &[RecurrentState]) -> Self {
        Self { states: states.iter().map(RecurrentState::detached).collect(), ..self }
    }

    /// The same with the texts of words, a list for each sequence and a text for each token, where the network reads their characters; of
    /// other networks it stays as it is.
    pub fn spelled<'a>(
        self,
        device: &Device,
        config: &ModelConfig,
        spellings: impl IntoIterator<Item = Option<&'a [Box<str>]>>,
    ) -> Result<Self, InputError> {
        let Some(settings) = config.own().spelled_words() else { return Ok(self) };
        let mut words: Vec<Vec<u32>> = Vec::with_capacity(self.layout.tokens());
        let mut spellings = spellings.into_iter();
        for (sequence, ends) in self.layout.offsets().windows(2).enumerate() {
            let tokens = (ends[1] - ends[0]) as usize;
            let own = spellings.next().flatten().filter(|own| own.len() == tokens);
            let own = own.ok_or(InputError::Spelling { sequence, tokens })?;
            words.extend(own.iter().map(|word| spell(word, settings.max_characters).collect()));
        }
        // What fills the batch up, if anything.
        words.resize_with(self.layout.tokens(), || spell("", settings.max_characters).collect());
        let words = Words::new(device, &settings, words.iter().map(Vec::as_slice))?;
        Ok(Self { spelled: Some(words), ..self })
    }

    /// The same with other tokens in their places.
    pub fn with_ids(&self, ids: Tensor) -> Self {
        Self { ids, ..self.clone() }
    }

    /// The same without what segments add to the scores of attention, where that can be left out.
    pub fn without_segments(mut self) -> Self {
        if let Some(streams) = &mut self.streams {
            streams.relations = streams.relations.without_segments();
        }
        self
    }

    /// Lays sequences out one after the other. `first_number` is the first one's number in the global batch, which
    /// dropout counts by. A decoder that reads sources without targets ([`TargetReading::from_source`]) gets them.
    pub fn new(
        device: &Device,
        config: &ModelConfig,
        sequences: &[Sequence<'_>],
        first_number: u32,
    ) -> Result<Self, InputError> {
        let batch = Self::laid_out(device, config, sequences, (None, None), first_number)?;
        let Some(TargetReading { start, from_source: true, .. }) = config.targets() else { return Ok(batch) };
        let mut ids: Vec<u32> = sequences.iter().flat_map(|s| shifted(s.ids, start)).collect();
        ids.resize(batch.layout.tokens(), 0);
        // The same layout, not an equal one: attention knows it by that.
        let target = Self { ids: Tensor::from_slice(device, [ids.len()], &ids)?, ..batch.clone() };
        Ok(Self { target_is_source: true, ..batch.with_target(target) })
    }

    /// Lays out sequences for two language models over words in opposite directions, each with sequences of its own. The network's output
    /// then has a row for each word, those of the first model first.
    pub fn in_two_directions(
        device: &Device,
        config: &ModelConfig,
        [forwards, backwards]: [&[Sequence<'_>]; 2],
        first_number: u32,
    ) -> Result<Self, InputError> {
        let all = [forwards, backwards].concat();
        let batch = Self::laid_out(device, config, &all, (None, None), first_number)?;
        let Some(words) = &batch.words else { return Err(InputError::NoDirections(config.model_type().to_owned())) };
        let offsets = words.layout.offsets();
        let border = offsets[forwards.len()];
        // What fills a layout up, if anything, stands nowhere.
        let places = |range: std::ops::Range<u32>, layout: &Layout| {
            let mut places: Vec<u32> = range.collect();
            places.resize(layout.tokens(), Device::NOWHERE);
            Tensor::from_slice(device, [places.len()], &places)
        };
        let layout = |offsets: &[u32], number: u32| {
            let lengths: Vec<usize> = offsets.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect();
            Layout::new(device, &lengths, number)?.for_steps(device)
        };
        let last = offsets.last().copied().unwrap_or(0);
        let layouts = [
            layout(&offsets[..=forwards.len()], first_number)?,
            layout(&offsets[forwards.len()..], first_number + forwards.len() as u32)?,
        ];
        let places = [places(0..border, &layouts[0])?, places(border..last, &layouts[1])?];
        let apart = Some(Apart { places, layouts });
        Ok(Self { apart, ..batch })
    }

    /// Lays out sequences some of whose tokens are predicted in an order, by a second stream that does not see them, and behind
    /// earlier tokens where there is a memory. The network's output then has rows for the second stream
    /// ([`Batch::predicted`]).
    pub fn in_order(
        device: &Device,
        config: &ModelConfig,
        sequences: &[Sequence<'_>],
        permutations: Option<&[Permutation<'_>]>,
        memory: Option<&Memory>,
        first_number: u32,
    ) -> Result<Self, InputError> {
        if !config.has_streams() && (permutations.is_some() || memory.is_some()) {
            return Err(InputError::NoStreams(config.model_type().to_owned()));
        }
        Self::laid_out(device, config, sequences, (permutations, memory), first_number)
    }

    /// Lays out sequences with masks at some rows of the flat batch, which are to be predicted, and gives the rows of the network's
    /// output where they are. Where a second stream predicts, it sees none of a sequence's masks.
    pub fn with_masks(
        device: &Device,
        config: &ModelConfig,
        sequences: &[Sequence<'_>],
        masks: &[u32],
        first_number: u32,
    ) -> Result<(Self, Tensor), InputError> {
        if !config.has_streams() || masks.is_empty() {
            let rows = Tensor::from_slice(device, [masks.len()], masks)?;
            return Ok((Self::new(device, config, sequences, first_number)?, rows));
        }
        let mut starts = vec![0];
        sequences.iter().for_each(|s| starts.push(starts[starts.len() - 1] + s.ids.len()));
        let mut orders: Vec<Vec<u32>> = sequences.iter().map(|s| vec![0; s.ids.len()]).collect();
        let mut targets: Vec<Vec<u32>> = vec![Vec::new(); sequences.len()];
        let mut places = Vec::with_capacity(masks.len());
        for mask in masks {
            let row = *mask as usize;
            let sequence = starts.partition_point(|start| *start <= row) - 1;
            let Some(ids) = sequences.get(sequence).map(|s| s.ids) else {
                let problem = format!("row {row} is masked, of {}", starts[sequences.len()]);
                return Err(InputError::Permutation { sequence, problem });
            };
            let at = row - starts[sequence];
            // Those that are not read are masks as well.
            let like = ids.iter().zip(&mut orders[sequence]).filter(|(id, _)| **id == ids[at]);
            like.for_each(|(_, order)| *order = 1);
            places.push((sequence, targets[sequence].len()));
            targets[sequence].push(at as u32);
        }
        let both = orders.iter().zip(&targets);
        let permutations: Vec<Permutation<'_>> =
            both.map(|(orders, targets)| Permutation { orders, targets }).collect();
        let batch = Self::in_order(device, config, sequences, Some(&permutations), None, first_number)?;
        let offsets = batch.output_layout().offsets();
        let row =
            |(sequence, target): &(usize, usize)| offsets[*sequence] + (sequences[*sequence].ids.len() + target) as u32;
        let rows: Vec<u32> = places.iter().map(row).collect();
        let rows = Tensor::from_slice(device, [rows.len()], &rows)?;
        Ok((batch, rows))
    }

    /// Lays out sources and the targets that an encoder-decoder shall write for them: it reads each target a token behind, after its
    /// start token. The targets end as they shall end, with the end token. A model that reads left to right has source and target in one
    /// sequence: it continues the first with the second, so that what predicts the tokens of a target begins at the last one of its source.
    pub fn pairs(
        device: &Device,
        config: &ModelConfig,
        sources: &[Sequence<'_>],
        targets: &[&[u32]],
        first_number: u32,
    ) -> Result<Self, InputError> {
        if config.targets().is_none() && config.sizes().causal && sources.len() == targets.len() {
            let pair = |(source, target): (&Sequence<'_>, &&[u32])| {
                let read = &target[..target.len().saturating_sub(1)];
                ([source.ids, read].concat(), [source.segments, &vec![0; read.len()]].concat())
            };
            let both: Vec<(Vec<u32>, Vec<u32>)> = sources.iter().zip(targets).map(pair).collect();
            let both: Vec<Sequence<'_>> = both.iter().map(|(ids, segments)| Sequence { ids, segments }).collect();
            return Self::laid_out(device, config, &both, (None, None), first_number);
        }
        let reading = config.targets().filter(|_| sources.len() == targets.len());
        let Some(TargetReading { start, .. }) = reading else {
            return Err(InputError::Targets { sources: sources.len(), targets: targets.len() });
        };
        let read: Vec<Vec<u32>> = targets.iter().map(|target| shifted(target, start).collect()).collect();
        let segments = vec![0; read.iter().map(Vec::len).max().unwrap_or(0)];
        let read: Vec<Sequence<'_>> =
            read.iter().map(|ids| Sequence { ids, segments: &segments[..ids.len()] }).collect();
        let target = Self::laid_out(device, config, &read, (None, None), first_number)?;
        Ok(Self::laid_out(device, config, sources, (None, None), first_number)?.with_target(target))
    }

    fn laid_out(
        device: &Device,
        config: &ModelConfig,
        sequences: &[Sequence<'_>],
        (permutations, memory): (Option<&[Permutation<'_>]>, Option<&Memory>),
        first_number: u32,
    ) -> Result<Self, InputError> {
        let sizes = config.sizes();
        let total = sequences.iter().map(|s| s.ids.len()).sum();
        let (mut ids, mut segments) = (Vec::<u32>::with_capacity(total), Vec::<u32>::with_capacity(total));
        let mut lengths = Vec::with_capacity(sequences.len());
        for (sequence, s) in sequences.iter().enumerate() {
            if s.ids.len() != s.segments.len() {
                return Err(InputError::Lengths { sequence, ids: s.ids.len(), segments: s.segments.len() });
            }
            let most = sizes.max_tokens;
            if s.ids.len() > most {
                return Err(InputError::TooLong { sequence, got: s.ids.len(), most });
            }
            if let Some(&got) = s.ids.iter().find(|id| **id as usize >= sizes.vocab_size) {
                return Err(InputError::Id { sequence, got, end: sizes.vocab_size });
            }
            if let Some(&got) = s.segments.iter().find(|id| **id as usize >= sizes.segments) {
                return Err(InputError::Segment { sequence, got, end: sizes.segments });
            }
            ids.extend(s.ids);
            segments.extend(s.segments);
            lengths.push(s.ids.len());
        }
        let recurrence = config.own().recurrence();
        // A second stream and a memory have layouts of their own, whose rows are not filled up together with those of tokens.
        if recurrence == Recurrence::Fed || permutations.is_some() || memory.is_some() {
            device.do_not_record();
        }
        let mut layout = Layout::new(device, &lengths, first_number)?;
        if recurrence == Recurrence::Layers {
            layout = layout.for_steps(device)?;
        }
        let relative = match config.relative_positions() {
            Some((buckets, rows)) => Some(RelativePositions::new(device, buckets, rows, &layout)?),
            None => None,
        };
        let streams = match config.has_streams() {
            true => Some(Streams::new(device, sequences, permutations, memory, (&layout, first_number))?),
            false => None,
        };
        let words = match config.characters() {
            Some(settings) => Some(WordStream::new(device, &settings, sequences, first_number, layout.tokens())?),
            None => None,
        };
        // What fills the batch up, if anything.
        ids.resize(layout.tokens(), 0);
        segments.resize(layout.tokens(), 0);
        Ok(Self {
            ids: Tensor::from_slice(device, [ids.len()], &ids)?,
            segments: Tensor::from_slice(device, [segments.len()], &segments)?,
            layout,
            relative,
            target: None,
            streams,
            target_is_source: false,
            words,
            spelled: None,
            states: Vec::new(),
            apart: None,
        })
    }
}

/// The ids behind a start token, without the last one.
fn shifted(ids: &[u32], start: u32) -> impl Iterator<Item = u32> {
    let kept = &ids[..ids.len().saturating_sub(1)];
    (!ids.is_empty()).then_some(start).into_iter().chain(kept.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Family;

    #[test]
    fn sequences_that_do_not_fit_are_refused() {
        let device = Device::cpu(None, Some(1)).unwrap();
        let config = Family::config_of_size("bert-tiny").unwrap();
        let (long, zeros) = (vec![1; 513], vec![0; 513]);
        let cases: [(&[u32], &[u32], &str); 5] = [
            (&[], &[], "sequence 1 of the batch is empty"),
            (&[1, 2], &[0], "2 ids but 1 segments"),
            (&[30522], &[0], "token id 30522 is not in the model's vocabulary of 30522"),
            (&[1], &[2], "segment 2"),
            (&long, &zeros, "has 513 tokens, the model takes 512"),
        ];
        for (ids, segments, expected) in cases {
            let good = Sequence { ids: &[1, 2], segments: &[0, 1] };
            let error = Batch::new(&device, &config, &[good, Sequence { ids, segments }], 0).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
