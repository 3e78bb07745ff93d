//! Weights into parameters: which key of a file belongs to which parameter, and whether all of them fit.
//!
//! Names, shapes and dtypes are checked before anything is allocated or written, numbers before parameters that are there
//! already are written: an error leaves all of them as they were. Nothing here knows a family: the names come from
//! [`Naming`].

use std::collections::BTreeMap;

use henson_models::Naming;
use henson_tensor::{Builder, DType, Device, Entry, Parameters};

use crate::report::{LoadReport, Misshapen, Missing, NonFinite, NotFloat, Repeated, Untied};
use crate::{CheckpointError, Weights};

/// Which parameters a file must have.
#[derive(Clone, Copy, Default)]
pub enum LoadMode<'a> {
    /// All of them.
    #[default]
    Strict,
    /// All but those for which this is true, such as a new head's: these stay as they were initialised.
    NewHead {
        /// Is asked for each parameter that the file does not have.
        may_miss: &'a dyn Fn(&Entry) -> bool,
    },
}

/// How weights are loaded.
#[derive(Clone, Copy, Default)]
pub struct LoadOptions<'a> {
    /// Which parameters the file must have.
    pub mode: LoadMode<'a>,
    /// Load NaN and infinite numbers too; the report still lists them.
    pub allow_non_finite: bool,
    /// Go on where a tensor that should be a copy of another is none, and use the other, as `transformers` does; the
    /// report still lists them.
    pub allow_untied: bool,
}

impl<'a> LoadOptions<'a> {
    /// Every parameter must be in the file.
    pub fn strict() -> Self {
        Self::default()
    }

    /// Parameters for which `may_miss` is true need not be in the file.
    pub fn new_head(may_miss: &'a dyn Fn(&Entry) -> bool) -> Self {
        Self { mode: LoadMode::NewHead { may_miss }, ..Self::default() }
    }
}

/// Sets parameters to the weights of a file and says which keys were left over.
///
/// A key belongs to the parameter of its name; or of its name with or without the family's prefix, or with today's
/// ending for an old one. Keys without a parameter are allowed and reported. An error of the kind
/// [`CheckpointError::DoesNotFit`] holds the whole report, and then no parameter was changed.
pub fn load(
    weights: &Weights,
    naming: &Naming,
    parameters: &mut Parameters,
    options: &LoadOptions<'_>,
) -> Result<LoadReport, CheckpointError> {
    let (sources, mut report) = check(weights, naming, parameters.entries(), options)?;
    read(weights, &sources, None, &mut report)?;
    weights.verify()?;
    refuse_faults(weights, &mut report, options)?;
    read(weights, &sources, Some(parameters), &mut LoadReport::default())?;
    weights.verify()?;
    Ok(report)
}

/// Parameters with the weights of a file, where the builder's layout fits them.
///
/// Nothing is allocated before the names and shapes of all tensors are checked: a config that promises a giant model is
/// refused because its weights are not there. Numbers are read once. Parameters that may miss start as `seed` draws them.
pub fn open_parameters(
    weights: &Weights,
    naming: &Naming,
    builder: Builder,
    device: &Device,
    dtype: DType,
    options: &LoadOptions<'_>,
    seed: u64,
) -> Result<(Parameters, LoadReport), CheckpointError> {
    let (sources, mut report) = check(weights, naming, builder.entries(), options)?;
    if !is_allowed(&report, options) {
        // The report names all faults, those of the numbers too.
        read(weights, &sources, None, &mut report)?;
        refuse_faults(weights, &mut report, options)?;
    }
    let mut parameters = builder.finish(device, dtype)?;
    if !report.fresh.is_empty() {
        parameters.initialise(seed)?;
    }
    read(weights, &sources, Some(&mut parameters), &mut report)?;
    weights.verify()?;
    refuse_faults(weights, &mut report, options)?;
    Ok((parameters, report))
}

/// Whether nothing in a report is a fault.
fn is_allowed(report: &LoadReport, options: &LoadOptions<'_>) -> bool {
    report.missing.is_empty()
        && report.misshapen.is_empty()
        && report.not_float.is_empty()
        && report.repeated.is_empty()
        && (report.non_finite.is_empty() || options.allow_non_finite)
        && (report.untied.is_empty() || options.allow_untied)
}

fn refuse_faults(weights: &Weights, report: &mut LoadReport, options: &LoadOptions<'_>) -> Result<(), CheckpointError> {
    if is_allowed(report, options) {
        return Ok(());
    }
    let (path, report) = (weights.path().to_owned(), Box::new(std::mem::take(report)));
    Err(CheckpointError::DoesNotFit { path, report })
}

/// Reads all numbers in the order of the files, counts those that are not finite, and writes them to the parameters where
/// there are some.
fn read(
    weights: &Weights,
    sources: &Sources<'_>,
    mut parameters: Option<&mut Parameters>,
    report: &mut LoadReport,
) -> Result<(), CheckpointError> {
    let mut order: Vec<(usize, &str)> = sources.iter().map(|(entry, key)| (*entry, *key)).collect();
    order.sort_by_key(|(_, key)| weights.place(key));
    for (entry, key) in order {
        let faulty = report.misshapen.iter().any(|other| other.key == key)
            || report.not_float.iter().any(|other| other.key == key);
        if faulty {
            continue;
        }
        let mut counted = NonFinite { key: key.to_owned(), nan: 0, infinite: 0, total: 0 };
        match &mut parameters {
            None => weights.for_each(key, |chunk| counted.add(chunk))?,
            Some(parameters) if parameters.entries()[entry].transposed => {
                let mut numbers = Vec::with_capacity(parameters.entries()[entry].shape.elements());
                weights.for_each(key, |chunk| {
                    counted.add(chunk);
                    numbers.extend_from_slice(chunk);
                })?;
                let numbers = parameters.entries()[entry].from_stored(numbers);
                parameters.write(entry, &numbers)?;
            }
            Some(parameters) => parameters.fill(entry, |mut rest| {
                weights.for_each(key, |chunk| {
                    counted.add(chunk);
                    // The tensor has the parameter's shape.
                    let (part, after) = std::mem::take(&mut rest).split_at_mut(chunk.len());
                    part.copy_from_slice(chunk);
                    rest = after;
                })
            })?,
        }
        if counted.nan + counted.infinite > 0 {
            report.non_finite.push(counted);
        }
    }
    match parameters {
        Some(parameters) => Ok(parameters.refresh()?),
        None => Ok(()),
    }
}

/// The key for each parameter that has one, by its place among the parameters.
type Sources<'w> = BTreeMap<usize, &'w str>;

fn check<'w>(
    weights: &'w Weights,
    naming: &Naming,
    entries: &[Entry],
    options: &LoadOptions<'_>,
) -> Result<(Sources<'w>, LoadReport), CheckpointError> {
    let names = Names::new(naming, entries);
    let mut report = LoadReport::default();
    let mut candidates: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    let mut copies = Vec::new();
    for key in weights.names() {
        if let Some(entry) = names.parameter(key) {
            candidates.entry(entry).or_default().push(key);
        } else if let Some(copy) = names.copy(key) {
            copies.push((key, copy));
        } else if naming.ignored_endings.iter().any(|ending| key.ends_with(ending)) {
            report.ignored.push(key.to_owned());
        } else {
            report.unused.push(key.to_owned());
        }
    }

    report.unused.extend(weights.others().iter().cloned());

    // Copies after all keys are known: whether they count depends on whether their original is there.
    let shape = |entry: usize| entries[entry].stored_shape();
    for (key, TiedCopy { original, in_use }) in copies {
        match candidates.get(&original).map(Vec::as_slice) {
            None => candidates.entry(original).or_default().push(key),
            Some([original_key, ..]) => match difference(weights, key, original_key)? {
                Some(0) => report.tied.push(key.to_owned()),
                // For a head that this model does not have.
                _ if !in_use => report.unused.push(key.to_owned()),
                different => {
                    let original = (*original_key).to_owned();
                    report.untied.push(Untied { copy: key.to_owned(), original, different });
                }
            },
            Some([]) => {}
        }
    }

    for (entry, parameter) in entries.iter().enumerate() {
        let Some(other) = parameter.otherwise.filter(|_| !candidates.contains_key(&entry)) else { continue };
        if let Some(keys) = candidates.get(&other).cloned() {
            candidates.insert(entry, keys);
        }
    }

    let mut sources = Sources::new();
    for (entry, keys) in candidates {
        let parameter = &entries[entry].name;
        let [key] = keys[..] else {
            let keys = keys.into_iter().map(str::to_owned).collect();
            report.repeated.push(Repeated { parameter: parameter.clone(), keys });
            continue;
        };
        let Some(info) = weights.get(key) else { continue };
        sources.insert(entry, key);
        let expected = shape(entry);
        if info.shape != expected.sizes() {
            let hint = shape_hint(parameter, expected.sizes(), &info.shape);
            let (expected, got) = (expected.sizes().to_vec(), info.shape.clone());
            report.misshapen.push(Misshapen { key: key.to_owned(), expected, got, hint });
        } else if !info.dtype.is_readable() {
            report.not_float.push(NotFloat { key: key.to_owned(), dtype: info.dtype });
        }
    }
    let repeated: Vec<&str> = report.repeated.iter().map(|repeated| repeated.parameter.as_str()).collect();
    for (entry, parameter) in entries.iter().enumerate() {
        let zeros = parameter.constant && !sources.contains_key(&entry);
        if zeros || sources.contains_key(&entry) || repeated.contains(&parameter.name.as_str()) {
            continue;
        }
        let missing = Missing { parameter: parameter.name.clone(), shape: parameter.stored_shape().sizes().to_vec() };
        match options.mode {
            LoadMode::NewHead { may_miss } if may_miss(parameter) => report.fresh.push(missing),
            _ => report.missing.push(missing),
        }
    }
    report.loaded = sources.len() - report.misshapen.len() - report.not_float.len();
    Ok((sources, report))
}

/// Finds parameters by the names that files use for them.
struct Names<'a> {
    naming: &'a Naming,
    entries: &'a [Entry],
    /// Their places by their names.
    names: BTreeMap<&'a str, usize>,
}

/// What a key that repeats another tensor is a copy of.
struct TiedCopy {
    /// The parameter.
    original: usize,
    /// Whether the model has the part that would use the copy.
    in_use: bool,
}

impl<'a> Names<'a> {
    fn new(naming: &'a Naming, entries: &'a [Entry]) -> Self {
        let names = entries.iter().enumerate().map(|(i, entry)| (entry.name.as_str(), i)).collect();
        Self { naming, entries, names }
    }

    /// The parameter that a key belongs to.
    fn parameter(&self, key: &str) -> Option<usize> {
        self.spellings(key).find_map(|name| self.names.get(name.as_str()).copied())
    }

    /// What a key is a copy of, if it is one and the model has the original.
    fn copy(&self, key: &str) -> Option<TiedCopy> {
        self.spellings(key).find_map(|name| {
            let (copy, original) = self.naming.tied.iter().find(|(copy, _)| *copy == name)?;
            let original = self.parameter(original)?;
            // `cls.predictions.decoder.weight` is of use to a model with something else in `cls.predictions.`; what stands in no
            // module, to one that has the original for its output.
            let in_use = match copy.rsplitn(3, '.').nth(2) {
                Some(module) => {
                    let bare = |name: &'static str| name.strip_prefix(self.naming.base_prefix).unwrap_or(name);
                    let below = |name: &str| name.strip_prefix(bare(module)).is_some_and(|rest| rest.starts_with('.'));
                    self.names.keys().any(|name| below(name.strip_prefix(self.naming.base_prefix).unwrap_or(name)))
                }
                None => self.entries[original].is_output,
            };
            Some(TiedCopy { original, in_use })
        })
    }

    /// What a key may be called in the model, the likeliest first.
    fn spellings(&self, key: &str) -> impl Iterator<Item = String> {
        let renamed =
            self.naming.old_endings.iter().find_map(|(old, new)| Some(key.strip_suffix(old)?.to_owned() + new));
        let prefix = self.naming.base_prefix;
        [Some(key.to_owned()), renamed].into_iter().flatten().flat_map(move |name| {
            let with = Some(format!("{prefix}{name}"));
            let without = name.strip_prefix(prefix).map(str::to_owned);
            [Some(name), with, without].into_iter().flatten()
        })
    }
}

/// How many numbers of two tensors differ; `None` if their shapes do, or one holds no numbers to compare.
pub fn difference(weights: &Weights, a: &str, b: &str) -> Result<Option<usize>, CheckpointError> {
    let (Some(info_a), Some(info_b)) = (weights.get(a), weights.get(b)) else { return Ok(None) };
    if info_a.shape != info_b.shape || !info_a.dtype.is_readable() || !info_b.dtype.is_readable() {
        return Ok(None);
    }
    let b = weights.read_f32(b)?;
    let (mut place, mut different) = (0, 0);
    weights.for_each(a, |chunk| {
        let other = &b[place..place + chunk.len()];
        // By bits, so that NaN equals NaN: that is another list's business.
        different += chunk.iter().zip(other).filter(|(x, y)| x.to_bits() != y.to_bits()).count();
        place += chunk.len();
    })?;
    Ok(Some(different))
}

/// The exponent's bits of an f32: all are set if it is not finite.
const EXPONENT: u32 = 0x7f80_0000;

impl NonFinite {
    fn add(&mut self, chunk: &[f32]) {
        self.total += chunk.len();
        // Nearly always nothing: one test for all, which the compiler makes a few wide instructions of.
        let not_finite = |x: &f32| x.to_bits() & EXPONENT == EXPONENT;
        if chunk.iter().fold(false, |found, x| found | not_finite(x)) {
            self.nan += chunk.iter().filter(|x| x.is_nan()).count();
            self.infinite += chunk.iter().filter(|x| x.is_infinite()).count();
        }
    }
}

fn shape_hint(parameter: &str, expected: &[usize], got: &[usize]) -> Option<&'static str> {
    let other_rows = expected.len() == got.len() && expected.get(1..) == got.get(1..);
    let has = |part: &str| parameter.contains(part);
    if !other_rows {
        return None;
    }
    if has("word_embeddings") || has("predictions.bias") || has("embed_tokens") {
        Some("the vocabulary does not fit the model: config and tokenizer must come with these weights")
    } else if has("position_embeddings") {
        Some("the longest sequence does not fit the model: see max_position_embeddings in the config")
    } else if has("classifier") || has("qa_outputs") {
        Some(
            "the head has another number of labels: see id2label in the config, or start from a model without this head",
        )
    } else {
        None
    }
}
