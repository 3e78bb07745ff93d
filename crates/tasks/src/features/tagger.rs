//! A tagger on a frozen encoder, in a directory and out of it.

use std::ops::{ControlFlow, Range};
use std::path::Path;

use henson_checkpoint::{Beside, Existing, ModelDirectory, SaveDType, SaveOptions, TensorFile, Weights, save_with};
use henson_infer::{
    Entity, InferError, Length, Model, TagInput, Tagged, TaggedWord, Task as Ability, Want, legal_steps,
};
use henson_models::recurrent::{WordTagger, WordTaggerSettings};
use henson_tensor::{Builder, DType, Device, Entry, Parameters};
use henson_text::{TextError, WordWindows, join_words, split_words};
use henson_train::TrainError;
use serde::{Deserialize, Serialize};

use super::layers::{FeatureLayers, vectors_of_words};
use super::learner::{DTYPE, tell};
use crate::error::TaskError;
use crate::example::{Input, Set, Words};
use crate::forms::lay_out_words;
use crate::predictions::Prediction;
use crate::read::{Reading, listed};

/// The file that says what a tagger is.
const DESCRIPTION: &str = "tagger.json";

/// The file with its weights.
const WEIGHTS: &str = "tagger.safetensors";

/// The version of both.
const FORMAT: u32 = 1;

/// Sentences that the tagger reads at a time.
const TOGETHER: usize = 64;

/// `tagger.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Description {
    pub(super) format: u32,
    /// What it was trained for.
    pub(super) task: String,
    pub(super) layers: FeatureLayers,
    /// Layers of the BiLSTM; 0: there is none.
    pub(super) lstm_layers: usize,
    /// Of both directions together.
    pub(super) hidden_size: usize,
    pub(super) crf: bool,
    /// Tokens of a sequence for the encoder.
    pub(super) max_length: usize,
    /// Whether the encoder reads a sentence among the others of its document.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) document_context: bool,
    pub(super) labels: Vec<String>,
}

impl Description {
    pub(super) fn new(task: &str, labels: &[String], layers: FeatureLayers, max_length: usize) -> Self {
        let (task, labels) = (task.to_owned(), labels.to_vec());
        Self {
            format: FORMAT,
            task,
            layers,
            lstm_layers: 0,
            hidden_size: 0,
            crf: false,
            max_length,
            document_context: false,
            labels,
        }
    }

    /// The sizes of the tagger on vectors of an encoder's layers side by side, `width` numbers in all.
    pub(super) fn settings(&self, width: usize, blocks: usize, dropout: f32) -> WordTaggerSettings {
        let mixed = self.layers.of_encoder(blocks).1;
        WordTaggerSettings {
            mixed,
            width: width / mixed.max(1),
            lstm_layers: self.lstm_layers,
            hidden: self.hidden_size / 2,
            labels: self.labels.len(),
            crf: self.crf,
            dropout,
        }
    }
}

/// A tagger that was read from its directory: an encoder, and what stands on vectors of its layers.
pub struct Tagger {
    model: Model,
    description: Description,
    network: WordTagger,
    parameters: Parameters,
}

/// What a tagger says about a sentence: for each word that has pieces its label and how likely each label is.
type Told = Vec<Option<(u32, Vec<f32>)>>;

impl Tagger {
    /// What it is, beside the files of its encoder.
    pub const FILES: [&str; 2] = [DESCRIPTION, WEIGHTS];

    /// Whether a directory holds one.
    pub fn is_in(path: &Path) -> bool {
        path.join(DESCRIPTION).is_file()
    }

    /// Reads encoder and tagger. The device is the encoder's; the tagger runs on the CPU.
    pub fn open(path: &Path, device: &Device, dtype: DType) -> Result<Self, TaskError> {
        let directory = ModelDirectory::open(path).map_err(TrainError::from)?;
        let description: Description = directory.read_json(DESCRIPTION).map_err(TrainError::from)?;
        let wrong = |problem: String| TrainError::State { path: path.join(DESCRIPTION), problem };
        if description.format != FORMAT {
            let problem = format!("its format is {}, and this henson reads {FORMAT}", description.format);
            return Err(wrong(problem).into());
        }
        if description.labels.is_empty() || description.lstm_layers > 16 || description.hidden_size > 1 << 14 {
            return Err(wrong("it has no labels, or sizes that cannot be".to_owned()).into());
        }
        let model = Model::open(path, device, dtype, Want::Encoder)?;
        let encoder_layers = model.config().model.sizes().num_hidden_layers;
        // One text tells how long a vector is, and that the encoder has these layers.
        let layers = description.layers.of_encoder(encoder_layers).0;
        let probe = model.features(&["."], layers, Length { most: Some(description.max_length), windows: true })?;
        let width = probe.first().map_or(0, |features| features.width);
        let mut builder = Builder::new();
        let network = WordTagger::build(&mut builder, description.settings(width, encoder_layers, 0.0));
        let network = network.with_legal_steps(legal_steps(&description.labels));
        let host = device.host().map_err(|error| TrainError::Task(error.into()))?;
        let mut parameters = builder.finish(&host, DTYPE).map_err(TrainError::from)?;
        read_parameters(&path.join(WEIGHTS), &mut parameters)?;
        Ok(Self { model, description, network, parameters })
    }

    /// Its labels, in the order of their numbers.
    pub fn labels(&self) -> &[String] {
        &self.description.labels
    }

    /// How a file is read for it: with its labels, where none are given.
    pub fn reading(&self, mut reading: Reading) -> Reading {
        if reading.files.labels.is_empty() {
            (reading.files.labels, reading.labels_of_model) = (self.labels().to_vec(), true);
        }
        reading
    }

    /// Tags all sentences of a set. `each` is told how many are done, and may end it.
    pub fn predict(
        &self,
        set: &Set,
        max_length: Option<usize>,
        each: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Prediction>, TaskError> {
        let own = self.labels();
        let place = |label: &String| set.labels.iter().position(|other| other == label).map(|place| place as u32);
        let order: Option<Vec<u32>> = own.iter().map(place).collect();
        let Some(order) = order.filter(|_| set.task.ability() == Some(Ability::Tag)) else {
            let (model, data) = (listed(own), listed(&set.labels));
            return Err(TaskError::OtherLabels { path: self.model.path().to_owned(), model, data });
        };
        let most = max_length.unwrap_or(self.description.max_length).min(self.model.most_tokens());
        let (tokenizer, context) = (self.model.tokenizer(), self.description.document_context);
        let lay_out = |words: &Words| lay_out_words(tokenizer, words, most, context);
        let told = self.tell(&sentences_of(set), lay_out, each)?;
        let outside = set.labels.iter().position(|label| label == "O").unwrap_or(0) as u32;
        let tag = |told: &Option<(u32, Vec<f32>)>| told.as_ref().map_or(outside, |(tag, _)| order[*tag as usize]);
        Ok(told.iter().map(|told| Prediction::Tags(told.iter().map(tag).collect())).collect())
    }

    /// Tags the words of each text; long ones go by windows.
    pub fn tag(&self, inputs: &[TagInput<'_>], max_length: Option<usize>) -> Result<Vec<Tagged>, TaskError> {
        let sentences: Vec<(String, Vec<Range<usize>>)> = inputs
            .iter()
            .map(|input| match input {
                TagInput::Text(text) => ((*text).to_owned(), split_words(text)),
                TagInput::Words(words) => join_words(words),
            })
            .collect();
        let most = max_length.unwrap_or(self.description.max_length).min(self.model.most_tokens());
        let lay_out = |(text, places): &(String, Vec<Range<usize>>)| {
            self.model.tokenizer().words_in_context(text, places, 0..places.len(), most)
        };
        let told = self.tell(&sentences, lay_out, |_| ControlFlow::Continue(()))?;
        let tagged = sentences.into_iter().zip(told).map(|((text, places), told)| {
            let word = |(place, told): (Range<usize>, Option<(u32, Vec<f32>)>)| match told {
                None => TaggedWord { place, label: None, score: 0.0, logits: Vec::new() },
                Some((tag, shares)) => TaggedWord {
                    place,
                    label: Some(tag as usize),
                    score: shares[tag as usize],
                    logits: shares.iter().map(|share| share.max(f32::MIN_POSITIVE).ln()).collect(),
                },
            };
            let words: Vec<TaggedWord> = places.into_iter().zip(told).map(word).collect();
            let entities = Entity::of_words(&words, self.labels());
            Tagged { text, words, entities, dropped: 0 }
        });
        Ok(tagged.collect())
    }

    fn tell<T>(
        &self,
        sentences: &[T],
        lay_out: impl Fn(&T) -> Result<WordWindows, TextError>,
        mut each: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Told>, TaskError> {
        let layers = self.description.layers.of_encoder(self.model.config().model.sizes().num_hidden_layers).0;
        let mut all = Vec::with_capacity(sentences.len());
        for some in sentences.chunks(TOGETHER) {
            let go_on = |_| ControlFlow::Continue(());
            let done = all.len();
            let numbers: Vec<usize> = (done + 1..=done + some.len()).collect();
            let (vectors, _) =
                vectors_of_words(&self.model, some, layers, &lay_out, go_on).map_err(|e| e.numbered(&numbers))?;
            let told = tell(&self.network, &self.parameters, &vectors)?;
            for (told, vectors) in told.into_iter().zip(vectors) {
                let (tags, shares) = told;
                if !shares.iter().all(|share| share.is_finite()) {
                    return Err(InferError::NotFinite { text: all.len() + 1 }.into());
                }
                let mut of_words = vec![None; vectors.count];
                for ((word, tag), shares) in vectors.words.iter().zip(tags).zip(shares.chunks(self.labels().len())) {
                    of_words[*word] = Some((tag, shares.to_vec()));
                }
                all.push(of_words);
            }
            if each(all.len()).is_break() {
                return Err(TaskError::Stopped);
            }
        }
        Ok(all)
    }
}

/// The sentences of a set.
pub(super) fn sentences_of(set: &Set) -> Vec<Words> {
    let words = set.examples.iter().map(|example| match &example.input {
        Input::Words { words, .. } => words.clone(),
        _ => Words::new(Vec::new()),
    });
    words.collect()
}

/// Writes encoder and tagger into a run's directory, all at once.
pub(super) fn save(
    out: &Path,
    model: &Model,
    description: &Description,
    parameters: &Parameters,
) -> Result<(), TrainError> {
    let mut files = model.tokenizer().files(Some(model.most_tokens()))?;
    let json = serde_json::to_vec_pretty(description)
        .map_err(|error| TrainError::State { path: out.join(DESCRIPTION), problem: error.to_string() })?;
    files.push((DESCRIPTION.to_owned(), json));
    let entries = parameters.entries();
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&i| &entries[i].name);
    let read = |place: usize| parameters.read(order[place]);
    let shape = |i: &usize| (entries[*i].name.clone(), entries[*i].shape.sizes().to_vec());
    let tensors = order.iter().map(shape).collect();
    let options = SaveOptions { existing: Existing::Merge, ..SaveOptions::default() };
    let file = TensorFile { name: WEIGHTS, tensors, read: &read };
    let beside = Beside { tensors: vec![file], ..Beside::default() };
    Ok(save_with(out, &files, &beside, &model.config().to_json()?, model.parameters(), SaveDType::F32, &options)?)
}

/// Reads all parameters, each checked for its shape.
fn read_parameters(path: &Path, parameters: &mut Parameters) -> Result<(), TrainError> {
    let weights = Weights::open_file(path)?;
    let entries = parameters.entries();
    let differs = |entry: &&Entry| weights.get(&entry.name).is_none_or(|info| info.shape != entry.shape.sizes());
    let problem = match entries.iter().find(differs) {
        Some(Entry { name, shape, .. }) => match weights.get(name) {
            Some(info) => {
                format!("{name} has the shape {:?}, and {DESCRIPTION} and the encoder ask for {shape}", info.shape)
            }
            None => format!("{name} of the shape {shape} is missing"),
        },
        None if weights.names().len() != entries.len() => {
            let extra = weights.names().find(|name| !entries.iter().any(|entry| entry.name == **name));
            format!("{} is not described in {DESCRIPTION}", extra.unwrap_or("a tensor"))
        }
        None => {
            let mut finite = true;
            for i in 0..parameters.entries().len() {
                let numbers = weights.read_f32(&parameters.entries()[i].name)?;
                finite &= numbers.iter().all(|x| x.is_finite());
                parameters.write(i, &numbers)?;
            }
            match finite {
                true => return Ok(parameters.refresh()?),
                false => "it has numbers that are not finite".to_owned(),
            }
        }
    };
    Err(TrainError::State { path: path.to_owned(), problem })
}
