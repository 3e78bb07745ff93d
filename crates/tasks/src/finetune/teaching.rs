//! The teachers of a run: opened when they are first asked, asked about every batch, or about all examples once and then kept on disk.
//!
//! What they say is a function of an example alone, whatever company it is read in, so that both ways give the same bits (on a CPU).
//! A file of what they said ([`super::kept`]) has the checksum of all that made it in its name; one that is damaged is reported and made again.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use henson_checkpoint::{Sums, read_limited, write_atomic};
use henson_infer::{Model, Want};
use henson_models::Head;
use henson_ranks::Ranks;
use henson_tensor::{DType, Device};
use henson_text::Tokenizer;
use henson_train::{Event, TrainError, Watch};
use sha2::{Digest, Sha256};

use super::kept;
use super::run::first_says;
use crate::distil::{DistilSettings, Lesson};
use crate::error::TaskError;
use crate::example::{Example, Set};
use crate::forms::{Asked, Soft};
use crate::forward::gather_scores;
use crate::framed::hex;
use crate::predict::label_order;
use crate::prepare::{LayingOut, Lengths, Prepared};

/// The largest file that is read.
const LIMIT: u64 = 16 << 30;

/// Examples that teachers are asked about at a time, where they are asked about all.
const TOGETHER: usize = 64;

/// The endings of files that say what a model is.
const MODEL_FILES: [&str; 5] = ["json", "safetensors", "bin", "txt", "model"];

/// Files of a run, which say nothing about its model.
const NO_MODEL_FILES: [&str; 2] = ["results.json", "state.json"];

/// Teachers, and all that their answers depend on.
pub(crate) struct Teaching {
    pub(crate) settings: DistilSettings,
    pub(crate) lesson: Lesson,
    /// Where the teachers are.
    directories: Vec<PathBuf>,
    dtype: DType,
    set: Arc<Set>,
    tokenizer: Arc<Tokenizer>,
    lengths: Lengths,
    /// Whether vectors get the length 1.
    normalise: bool,
    opened: OnceLock<Vec<Teacher>>,
    kept: OnceLock<Vec<Soft>>,
}

struct Teacher {
    model: Model,
    order: Vec<usize>,
    lengths: Lengths,
}

/// What a run's teachers are made of.
pub(crate) struct TeachingParts {
    pub(crate) settings: DistilSettings,
    pub(crate) directories: Vec<PathBuf>,
    pub(crate) dtype: DType,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) lengths: Lengths,
    pub(crate) normalise: bool,
}

impl fmt::Debug for Teaching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Teaching")
            .field("settings", &self.settings)
            .field("lesson", &self.lesson)
            .finish_non_exhaustive()
    }
}

impl Teaching {
    /// Teachers for the examples of a set. Nothing is opened yet.
    pub(crate) fn new(parts: TeachingParts, lesson: Lesson, set: Arc<Set>) -> Self {
        let TeachingParts { settings, directories, dtype, tokenizer, lengths, normalise } = parts;
        let (opened, kept) = (OnceLock::new(), OnceLock::new());
        Self { settings, lesson, directories, dtype, set, tokenizer, lengths, normalise, opened, kept }
    }

    /// What teachers say about some examples, by their numbers.
    pub(crate) fn said(&self, device: &Device, numbers: &[u32]) -> Result<Vec<Soft>, TaskError> {
        if let Some(kept) = self.kept.get() {
            return Ok(numbers.iter().map(|number| kept[*number as usize].clone()).collect());
        }
        let examples: Vec<&Example> = numbers.iter().map(|number| &self.set.examples[*number as usize]).collect();
        self.ask(device, &examples)
    }

    /// Where answers are kept, finds all of them there, or asks for them and writes them down. Of several ranks the first one finds and
    /// writes, and each asks about a part.
    pub(crate) fn keep(&self, device: &Device, ranks: Option<&Ranks>, watch: &mut Watch<'_>) -> Result<(), TaskError> {
        if self.settings.cache.is_empty() || self.kept.get().is_some() {
            return Ok(());
        }
        let place = Path::new(&self.settings.cache);
        let path = place.join(format!("teacher-{}.outputs", &self.digest()?[..32]));
        let is_first = ranks.is_none_or(|ranks| ranks.rank() == 0);
        let mut found = None;
        if is_first {
            fs::create_dir_all(place).map_err(|source| TrainError::Io {
                action: "create",
                path: place.to_owned(),
                source,
            })?;
            found = self.read(&path, watch);
        }
        let is_there = first_says(ranks, found.is_some());
        let all = match is_there {
            true => on_all(ranks, found.unwrap_or_default())?,
            false => self.ask_about_all(device, ranks, watch)?,
        };
        if all.len() != self.set.examples.len() {
            return Err(nonsense());
        }
        if is_first && !is_there {
            write_atomic(&path, &kept::written(&all)).map_err(TrainError::from)?;
        }
        self.kept.set(all).ok();
        Ok(())
    }

    /// What teachers say about all examples. Several ranks take turns: in every round each asks about the next few. So they wait for each
    /// other no longer than one round takes, and who stops, stops all.
    fn ask_about_all(
        &self,
        device: &Device,
        ranks: Option<&Ranks>,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Soft>, TaskError> {
        let (rank, size) = ranks.map_or((0, 1), |ranks| (ranks.rank(), ranks.size()));
        let mut all = Vec::with_capacity(self.set.examples.len());
        for round in self.set.examples.chunks(size * TOGETHER) {
            let stops = watch.stop.load(Ordering::Relaxed);
            if ranks.map_or(stops, |ranks| ranks.gather(&[u8::from(stops)]).contains(&vec![1])) {
                return Err(TaskError::Stopped);
            }
            (watch.on)(Event::Teaching { done: all.len(), of: self.set.examples.len() });
            let own = match round.chunks(TOGETHER).nth(rank) {
                Some(examples) => self.ask(device, &examples.iter().collect::<Vec<_>>())?,
                // In the last round there may be less to ask about than there are ranks.
                None => Vec::new(),
            };
            all.extend(on_all(ranks, own)?);
        }
        Ok(all)
    }

    /// What a file holds, if it is there and whole.
    fn read(&self, path: &Path, watch: &mut Watch<'_>) -> Option<Vec<Soft>> {
        if !path.exists() {
            return None;
        }
        let read = read_limited(path, LIMIT).map_err(|error| error.to_string());
        let parsed = read.and_then(|bytes| {
            let found = kept::parse(&bytes).filter(|found| found.len() == self.set.examples.len());
            found.ok_or_else(|| format!("{} is damaged", path.display()))
        });
        match parsed {
            Ok(kept) => Some(kept),
            Err(problem) => {
                let text = format!("{problem}: the teachers are asked again");
                (watch.on)(Event::Warning { text: &text });
                None
            }
        }
    }

    fn ask(&self, device: &Device, examples: &[&Example]) -> Result<Vec<Soft>, TaskError> {
        let with = LayingOut {
            task: self.set.task,
            labels: &self.set.labels,
            tokenizer: &self.tokenizer,
            lengths: &self.lengths,
        };
        let lay_out = |example: &&Example| self.set.task.form.lay_out_example(&with, example);
        let students: Vec<Prepared> =
            examples.iter().map(lay_out).collect::<Result<_, _>>().map_err(TrainError::from)?;
        let teachers = self.teachers(device)?;
        let mut joined: Vec<Soft> = Vec::new();
        for (number, teacher) in teachers.iter().enumerate() {
            let asked = Asked {
                teacher: &teacher.model,
                order: &teacher.order,
                lengths: &teacher.lengths,
                set: &self.set,
                examples,
                students: &students,
                temperature: self.settings.temperature,
                normalise: self.normalise,
            };
            let said = asked.said(self.lesson)?;
            if number == 0 {
                joined = said;
            } else if !joined.iter_mut().zip(&said).all(|(to, from)| add(to, from)) {
                let (first, second) = (self.directories[0].clone(), self.directories[number].clone());
                return Err(TaskError::Ensemble { first, second });
            }
        }
        if teachers.len() > 1 {
            let share = 1.0 / teachers.len() as f32;
            joined.iter_mut().flatten().flatten().for_each(|x| *x *= share);
        }
        Ok(joined)
    }

    fn teachers(&self, device: &Device) -> Result<&[Teacher], TaskError> {
        if let Some(teachers) = self.opened.get() {
            return Ok(teachers);
        }
        let form = self.set.task.form;
        let vectors = form.head(1) == Head::Encoder;
        let open = |path: &PathBuf| {
            let want = if vectors { Want::Encoder } else { Want::AsSaved };
            let model = Model::open(path, device, self.dtype, want)?;
            let order = if vectors { Vec::new() } else { label_order(&model, &self.set)? };
            if model.network().beams().is_some() {
                return Err(TaskError::Beams { path: path.clone() });
            }
            let lengths = Lengths::of_model(&model, self.set.task);
            Ok(Teacher { model, order, lengths })
        };
        let opened = self.directories.iter().map(open).collect::<Result<Vec<_>, TaskError>>()?;
        Ok(self.opened.get_or_init(|| opened))
    }

    /// The checksum of all that answers depend on: the teachers' files, the tokenizer and the lengths of the model that learns, the
    /// examples, and the settings.
    pub(crate) fn digest(&self) -> Result<String, TaskError> {
        let mut hash = Sha256::new();
        let settings = &self.settings;
        hash.update(format!(
            "{:?} {:?} {} {} {:?} {:?}",
            self.lesson, self.dtype, settings.temperature, self.normalise, self.lengths, self.set.labels
        ));
        for directory in &self.directories {
            hash_directory(&mut hash, &Model::encoder_directory(directory)?)?;
            hash_directory(&mut hash, directory)?;
        }
        for (name, bytes) in self.tokenizer.files(None).map_err(TrainError::from)? {
            hash.update(name);
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        }
        for example in &self.set.examples {
            hash.update(format!("{:?}", example.input));
        }
        Ok(hex(&hash.finalize()))
    }
}

/// What all ranks have, in their order, on every rank.
fn on_all(ranks: Option<&Ranks>, own: Vec<Soft>) -> Result<Vec<Soft>, TaskError> {
    let Some(ranks) = ranks else { return Ok(own) };
    gather_scores(ranks, &own).ok_or_else(nonsense)
}

fn nonsense() -> TaskError {
    TrainError::Ranks("what teachers said to other ranks makes no sense: are all of the same version?".to_owned())
        .into()
}

/// Adds another teacher's targets. False where the two are of different shapes.
fn add(to: &mut Soft, from: &Soft) -> bool {
    to.len() == from.len()
        && to.iter_mut().zip(from).all(|(to, from)| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            to.len() == from.len()
        })
}

/// The names and checksums of the files that say what a model is, in the order of their names, those of folders within as well.
fn hash_directory(hash: &mut Sha256, directory: &Path) -> Result<(), TaskError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| TaskError::Train(TrainError::Io { action: "read", path, source })
    };
    let entries = |place: &Path| -> Result<Vec<PathBuf>, TaskError> {
        let entries = fs::read_dir(place).map_err(io(place))?;
        let mut paths: Vec<PathBuf> =
            entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>().map_err(io(place))?;
        paths.sort();
        Ok(paths)
    };
    let is_model = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        MODEL_FILES.contains(&ending.as_str()) && !NO_MODEL_FILES.contains(&name.as_str()) && path.is_file()
    };
    let mut files = Vec::new();
    for path in entries(directory)? {
        // A module of sentence-transformers, such as 1_Pooling.
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name.starts_with(|c: char| c.is_ascii_digit()) {
            files.extend(entries(&path)?.into_iter().filter(|path| is_model(path)));
        } else if is_model(&path) {
            files.push(path);
        }
    }
    for path in files {
        hash.update(path.strip_prefix(directory).unwrap_or(&path).to_string_lossy().as_bytes());
        hash.update(Sums::of_file(&path).map_err(TrainError::from)?);
    }
    Ok(())
}
