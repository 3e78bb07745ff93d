//! Pre-training on running text: a network reads rows of it a few tokens at a time, and begins each step with the states that the step
//! before ended with. Gradients stay within a step (truncated back-propagation), states do not.
//!
//! Of a recurrent network, each token predicts the next (Zaremba et al. 2014), or two networks over words predict the next word and the one
//! before (Peters et al. 2018), each with rows of its own and one table of words for both. Of XLNet, the states are its memory: what every
//! layer read of the last tokens (Dai et al. 2019, Yang et al. 2019), and tokens are predicted in an order.
//!
//! Legend: B rows, L units of a step, P predictions of a part.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use henson_data::{Corpus, DataError, Instances, Objective, Part, Place, Rows, Stream, WordList};
use henson_models::{Batch, Capture, Memory, MemorySettings, Model, ModelConfig, Sequence};
use henson_tensor::{Bits, DType, Device, Pass, RecurrentState, Tensor};
use henson_text::{Slot, Template};

use crate::error::{Result, TrainError};
use crate::losses::{EQUAL, LossNames};
use crate::objective::Masked;
use crate::pretraining::{self, HELD_OUT_SEED};
use crate::recipe::Recipe;
use crate::run::Carried;
use crate::trainer::{Engine, Evaluation, Underway};

/// Steps that each row of held-out text has at least, where the text is long enough: a state that has seen nothing predicts badly.
const HELD_OUT_STEPS: u64 = 16;

/// Maximum number of tokens that are remembered.
const MOST_REMEMBERED: usize = 1 << 16;

/// What is read of a text, and what is predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reads {
    /// Tokens, each of which predicts the next.
    Tokens,
    /// Words in two directions, each of which predicts its neighbour.
    Words,
    /// Tokens, some of which are predicted in an order.
    InOrder,
}

/// A text in rows.
#[derive(Debug)]
enum Text {
    Units(Stream),
    Sequences(Rows),
}

impl Text {
    fn with_rows(self, rows: usize) -> std::result::Result<Self, DataError> {
        Ok(match self {
            Self::Units(stream) => Self::Units(stream.with_rows(rows)?),
            Self::Sequences(sequences) => Self::Sequences(sequences.with_rows(rows)?),
        })
    }

    /// Steps of an epoch.
    fn steps(&self) -> u64 {
        match self {
            Self::Units(stream) => stream.steps(),
            Self::Sequences(rows) => rows.steps(),
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::Units(stream) => stream.rows(),
            Self::Sequences(rows) => rows.rows(),
        }
    }

    /// A step in so many parts.
    fn step(&self, place: Place, parts: usize) -> std::result::Result<Vec<Part>, DataError> {
        match self {
            Self::Units(stream) => stream.step(place.index, parts),
            Self::Sequences(rows) => rows.step(place, parts),
        }
    }
}

/// The text of a run, as it is read.
#[derive(Debug)]
pub(crate) struct RunningText {
    reads: Reads,
    train: Text,
    held_out: Option<Text>,
    /// The words that are predicted, where units are words.
    pub(crate) words: Option<Arc<WordList>>,
}

impl RunningText {
    /// The text of a recipe for a model. Where it reads words as characters, the words that it predicts are counted, and the config
    /// gets their number; where it has a memory, the config gets what is remembered of a sequence.
    pub(crate) fn open(
        recipe: &Recipe,
        config: &mut ModelConfig,
        template: &Template,
        corpus: &Arc<Corpus>,
        held_out: Option<&Arc<Corpus>>,
    ) -> Result<Self> {
        let (rows, length, in_order) =
            (recipe.batch_size, recipe.sequence_length, recipe.objective == Objective::Permutation);
        if in_order {
            set_memory(recipe, config, template)?;
        }
        let words = match config.characters() {
            None => None,
            Some(settings) => {
                let most = config.predicted_words().unwrap_or(0);
                if most < 4 {
                    let expected = "the number of words that are predicted, such as config.n_tokens_vocab=50000";
                    return Err(TrainError::setting("config.n_tokens_vocab", most, expected));
                }
                let list = Arc::new(WordList::of_corpus(corpus, most)?);
                config.set_predicted_words(list.len());
                Some((list, settings.max_characters.saturating_sub(2)))
            }
        };
        let open = |corpus: &Arc<Corpus>, rows: usize, seed: u64| -> std::result::Result<Text, DataError> {
            if in_order {
                let settings = recipe.instances(&Default::default());
                let instances = Instances::new(Arc::clone(corpus), template.clone(), settings, seed)?;
                return Ok(Text::Sequences(Rows::new(Arc::new(instances), rows)?));
            }
            Ok(Text::Units(match &words {
                None => Stream::of_tokens(Arc::clone(corpus), rows, length)?,
                Some((list, bytes)) => Stream::of_words(Arc::clone(corpus), Arc::clone(list), *bytes, rows, length)?,
            }))
        };
        let train = open(corpus, rows, recipe.seed)?;
        let held_out = match held_out {
            None => None,
            Some(corpus) => {
                let whole = open(corpus, 1, HELD_OUT_SEED)?;
                let fits = (whole.steps() / HELD_OUT_STEPS).max(1) as usize;
                Some(whole.with_rows(rows.min(fits))?)
            }
        };
        let words = words.map(|(list, _)| list);
        let reads = match &words {
            _ if in_order => Reads::InOrder,
            Some(_) => Reads::Words,
            None => Reads::Tokens,
        };
        Ok(Self { reads, train, held_out, words })
    }

    /// Updates of so many epochs.
    pub(crate) fn steps_of_epochs(&self, epochs: f64) -> u64 {
        (self.train.steps() as f64 * epochs).ceil() as u64
    }
}

/// How much is remembered: the last `mem_len` tokens of a row, without the special tokens that stand behind each sequence.
fn set_memory(recipe: &Recipe, config: &mut ModelConfig, template: &Template) -> Result<()> {
    let most = config.memory().and_then(|memory| memory.most).unwrap_or(0);
    if !(1..=MOST_REMEMBERED).contains(&most) {
        let expected = format!(
            "the number of tokens that are remembered, 1 to {MOST_REMEMBERED}, such as config.mem_len=384; or packing = \"blocks\", \
             where nothing is"
        );
        return Err(TrainError::setting("config.mem_len", most, expected));
    }
    let behind = template.single_slots().iter().rev().take_while(|slot| matches!(slot, Slot::Special { .. })).count();
    let text = recipe.sequence_length.saturating_sub(behind);
    if let Some(given) = recipe.config.get("reuse_len").filter(|given| given.as_integer() != Some(text as i64)) {
        let expected =
            format!("nothing, or {text}: all of a sequence but what stands behind its text; no text is read twice");
        return Err(TrainError::setting("config.reuse_len", given, expected));
    }
    config.set_remembered(text);
    Ok(())
}

/// Refuses running text for networks without states, and words in two directions where a network does not read them.
pub(crate) fn check_model(recipe: &Recipe, config: &ModelConfig, corpus: &Corpus) -> Result<()> {
    let (streams, words) = (recipe.instances(&Default::default()).is_stream(), config.characters().is_some());
    if streams && !config.carries_states() && config.memory().is_none() {
        let expected = format!(
            "another: {} has no states to carry, as lstm-small, elmo-small and xlnet-base have",
            config.model_type()
        );
        return Err(TrainError::setting("packing", "stream", expected));
    }
    let both = recipe.objective == Objective::Bidirectional;
    if words != both {
        let expected = match words {
            true => format!("bidirectional: {} predicts words from both sides", config.model_type()),
            false => format!(
                "causal or another: {} does not read words as characters, as elmo-small does",
                config.model_type()
            ),
        };
        let got = if both { "bidirectional" } else { "another" };
        return Err(TrainError::setting("objective", got, expected));
    }
    let bytes = config.sizes().vocab_size;
    if words && corpus.vocabulary().size as usize != bytes {
        return Err(TrainError::Vocabulary(format!(
            "{} was built with a vocabulary of {} tokens, and {} reads the {bytes} bytes and marks of `henson data build \
             --tokenizer bytes`: build the data with that",
            recipe.data,
            corpus.vocabulary().size,
            config.model_type()
        )));
    }
    Ok(())
}

/// The states between two passes over the same rows: those that the last one ended with. Of a memory, a row for each token that is
/// remembered, equally many for each sequence.
type Between = Rc<RefCell<Vec<RecurrentState>>>;

/// Where a run stands in its text.
pub(crate) struct Unrolled {
    text: Arc<RunningText>,
    parts: usize,
    smoothing: f32,
    /// For each part of a step.
    states: Vec<Between>,
    /// From a checkpoint, until the device is known.
    kept: Vec<Carried>,
    dtype: DType,
}

impl Unrolled {
    pub(crate) fn new(text: Arc<RunningText>, recipe: &Recipe) -> Self {
        let (parts, smoothing, dtype) = (recipe.accumulation, recipe.label_smoothing as f32, DType::from(recipe.dtype));
        let states = (0..parts).map(|_| Between::default()).collect();
        Self { text, parts, smoothing, states, kept: Vec::new(), dtype }
    }

    /// Goes on with the states of a checkpoint.
    pub(crate) fn resume(&mut self, kept: Vec<Carried>) {
        self.kept = kept;
    }

    /// The gradients of a step, and where the next one is.
    pub(crate) fn step(&mut self, engine: &mut Engine, step: u64, place: &mut Place) -> Result<Underway> {
        if place.index >= self.text.train.steps() {
            *place = Place { epoch: place.epoch + 1, index: 0 };
        }
        match place.index {
            0 => self.begin(),
            _ => self.restore(engine.parameters.device())?,
        }
        let data = self.text.train.step(*place, self.parts)?;
        let underway = self.learn(engine, step, &data)?;
        place.index += 1;
        Ok(underway)
    }

    /// An epoch begins: nothing is carried into it, not by a checkpoint either.
    pub(crate) fn begin(&mut self) {
        self.states.iter().for_each(|states| states.borrow_mut().clear());
        self.kept.clear();
    }

    /// The gradients of what was read.
    pub(crate) fn learn(&self, engine: &mut Engine, step: u64, data: &[Part]) -> Result<Underway> {
        let predicted: usize = data.iter().map(|part| part.rows.len()).sum();
        let objective = Unroll { reads: self.text.reads, smoothing: Bits::from(self.smoothing) };
        let parts = engine.in_parts(step, data.len(), |engine, i| {
            let fill = |device: &Device, config: &ModelConfig| {
                let weight = 1.0 / predicted.max(1) as f32;
                Inputs::new(device, config, &data[i], objective.reads, weight, &self.states[i])
            };
            Ok(vec![engine.learn(step, objective, fill, Unroll::losses)?])
        })?;
        let (mut weights, mut tokens) = (EQUAL, predicted);
        match objective.reads {
            Reads::Tokens => {}
            Reads::Words => weights[..2].fill(0.5),
            Reads::InOrder => tokens = data.iter().map(|part| part.ids.len()).sum(),
        }
        Ok(Underway { parts, losses: objective.names(), weights, tokens })
    }

    /// The states of a checkpoint become those of the next step.
    fn restore(&mut self, device: &Device) -> Result<()> {
        let mut kept = std::mem::take(&mut self.kept).into_iter().peekable();
        while let Some(hidden) = kept.next() {
            let cell = kept.next_if(|next| next.layer == hidden.layer && next.part == hidden.part);
            let cell = cell.as_ref().map(|cell| (&cell.numbers[..], cell.width));
            let state = RecurrentState::from_numbers(device, self.dtype, (&hidden.numbers, hidden.width), cell)?;
            let states = self.states.get(hidden.part);
            states.into_iter().for_each(|states| states.borrow_mut().push(state.clone()));
        }
        match self.states.iter().all(|states| !states.borrow().is_empty()) {
            true => Ok(()),
            false => Err(TrainError::State {
                path: "optimizer.safetensors".into(),
                problem: "it lacks the states that the next step begins with".to_owned(),
            }),
        }
    }

    /// What the next step begins with, for a checkpoint.
    pub(crate) fn carried(&self) -> Result<Vec<Carried>> {
        let mut all = Vec::new();
        for (part, states) in self.states.iter().enumerate() {
            for (layer, state) in states.borrow().iter().enumerate() {
                let named = [("hidden", Some(&state.hidden)), ("cell", state.cell.as_ref())];
                for (what, value) in named.into_iter().filter_map(|(what, value)| Some((what, value?))) {
                    let (numbers, width) = (value.tensor().to_f32()?, value.tensor().columns());
                    all.push(Carried { part, layer, what, width, numbers });
                }
            }
        }
        Ok(all)
    }

    /// Loss, perplexity and accuracy on held-out text, by direction where there are two. Its states begin at zeros, its memory with
    /// nothing.
    pub(crate) fn evaluate(&self, engine: &mut Engine, sequences: usize) -> Result<Option<Evaluation>> {
        let Some(stream) = &self.text.held_out else { return Ok(None) };
        let reads = self.text.reads;
        let steps = stream.steps().min(sequences.div_ceil(stream.rows()) as u64).max(1);
        let (states, mut readings, mut predicted) = (Between::default(), Vec::new(), 0);
        for step in 0..steps {
            let part = &stream.step(Place { epoch: 0, index: step }, 1)?[0];
            let fill = |device: &Device, config: &ModelConfig| Inputs::new(device, config, part, reads, 1.0, &states);
            readings.push(engine.look((), fill, |(), model, pass, inputs| inputs.found(model, pass))?);
            predicted += part.rows.len();
        }
        let mut sums = [0.0; 4];
        for reading in readings {
            sums.iter_mut().zip(reading.wait()?).for_each(|(sum, number)| *sum += number);
        }
        let mut metrics = BTreeMap::new();
        let mut set = |name: &str, value: f64| _ = metrics.insert(name.to_owned(), value);
        let [loss, right, backward, backward_right] = sums;
        if reads != Reads::Words {
            let loss = loss / predicted.max(1) as f64;
            set("loss", loss);
            set("perplexity", loss.exp());
            set("accuracy", right / predicted.max(1) as f64);
            return Ok(Some(Evaluation { metrics, score: loss, loss: None }));
        }
        let half = (predicted / 2).max(1) as f64;
        let [forward, backward] = [loss / half, backward / half];
        set("loss", (forward + backward) / 2.0);
        set("forward_perplexity", forward.exp());
        set("backward_perplexity", backward.exp());
        // As the authors report it: the mean of both.
        set("perplexity", (forward.exp() + backward.exp()) / 2.0);
        set("accuracy", (right + backward_right) / (2.0 * half));
        Ok(Some(Evaluation { metrics, score: (forward + backward) / 2.0, loss: None }))
    }
}

/// What is learned from running text.
#[derive(Clone, Copy, Hash)]
struct Unroll {
    reads: Reads,
    smoothing: Bits,
}

impl Unroll {
    fn names(self) -> LossNames {
        match self.reads {
            Reads::Tokens => &["lm_loss"],
            Reads::Words => &["forward_loss", "backward_loss"],
            Reads::InOrder => &["permutation_loss"],
        }
    }

    fn losses(&self, model: &Model, pass: &mut Pass<'_>, inputs: &Inputs) -> Result<Vec<Tensor>> {
        let (classes, smoothing) = (model.config().predicted_classes(), self.smoothing.get());
        let logits = inputs.logits(model, pass)?;
        let mut losses = Vec::with_capacity(logits.len());
        for (logits, masked) in logits.into_iter().zip(&inputs.predicted) {
            let weights = masked.weights.as_ref();
            losses.push(pass.smoothed_cross_entropy(logits, classes, &masked.targets, weights, smoothing, 1.0)?.0);
        }
        Ok(losses)
    }
}

/// A part of a step on the device.
struct Inputs {
    batch: Batch,
    /// What is predicted: of words, forwards and backwards.
    predicted: Vec<Masked>,
    /// How much is remembered, where the states are those of a memory.
    memory: Option<MemorySettings>,
    /// Where the states go that the rows end with.
    ended: Between,
}

impl Inputs {
    fn new(
        device: &Device,
        config: &ModelConfig,
        part: &Part,
        reads: Reads,
        weight: f32,
        states: &Between,
    ) -> Result<Self> {
        let (ended, memory) = (Rc::clone(states), config.memory().filter(|_| reads == Reads::InOrder));
        let states = states.borrow();
        if memory.is_some() {
            // What is remembered is picked while the pass runs.
            device.do_not_record();
            let earlier = match states.is_empty() {
                true => None,
                false => Some(Memory::of_states(&states, part.lengths.len())?),
            };
            let pretraining::Inputs { batch, masked, .. } =
                pretraining::Inputs::behind(device, config, part, weight, earlier.as_ref())?;
            return Ok(Self { batch, predicted: vec![masked], memory, ended });
        }
        device.reads_in_place(&states);
        let mut start = 0;
        let sequences: Vec<Sequence<'_>> = part
            .lengths
            .iter()
            .map(|length| {
                let range = start..start + length;
                start = range.end;
                Sequence { ids: &part.ids[range.clone()], segments: &part.segments[range] }
            })
            .collect();
        let (batch, directions) = match reads {
            Reads::Words => {
                let (forwards, backwards) = sequences.split_at(sequences.len() / 2);
                (Batch::in_two_directions(device, config, [forwards, backwards], part.first_number)?, 2)
            }
            _ => (Batch::new(device, config, &sequences, part.first_number)?, 1),
        };
        let each = (part.rows.len() / directions).max(1);
        let predicted = part.rows.chunks(each).zip(part.targets.chunks(each));
        let predicted: std::result::Result<_, _> =
            predicted.map(|(rows, targets)| Masked::new(device, rows, targets, weight)).collect();
        Ok(Self { batch: batch.continuing(&states), predicted: predicted?, memory, ended })
    }

    /// The logits of what is predicted, P×V each. Keeps the states that the rows end with.
    fn logits(&self, model: &Model, pass: &mut Pass<'_>) -> Result<Vec<henson_tensor::Var>> {
        let capture = Capture { hidden_states: self.memory.is_some(), ..Capture::default() };
        let encoded = model.encode(pass, &self.batch, capture)?;
        match self.memory {
            Some(memory) => {
                let after = Memory::after(pass.device(), &self.batch, &encoded.hidden_states, memory)?;
                *self.ended.borrow_mut() = after.to_states();
            }
            None => pass.carry(&encoded.states, &mut self.ended.borrow_mut())?,
        }
        let rows = self.predicted.iter().map(|masked| &masked.rows);
        let logits = |rows| model.logits_of(pass, encoded.last.clone(), self.batch.output_layout(), Some(rows));
        Ok(rows.map(logits).collect::<std::result::Result<_, _>>()?)
    }

    /// Of each direction the sum of losses, and how many predictions are right.
    fn found(&self, model: &Model, pass: &mut Pass<'_>) -> Result<Vec<Tensor>> {
        let (classes, mut found) = (model.config().predicted_classes(), Vec::new());
        for (logits, masked) in self.logits(model, pass)?.into_iter().zip(&self.predicted) {
            let weights = masked.weights.as_ref();
            let right = pass.count_correct(&logits, classes, &masked.targets, weights)?;
            found.extend([pass.cross_entropy(logits, classes, &masked.targets, weights, 1.0)?.0, right]);
        }
        Ok(found)
    }
}
