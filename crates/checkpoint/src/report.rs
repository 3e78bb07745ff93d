//! What a load found, key by key: one report of everything that does not fit, so that nobody mends one key at a time.

use std::fmt;

use crate::safetensors::StoredDType;

/// Lines of each list that [`LoadReport`]'s `Display` shows.
const SHOWN: usize = 12;

/// Every key of a file and every parameter of a model that do not simply belong together.
#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    /// How many parameters the file has numbers for.
    pub loaded: usize,
    /// Parameters without a key, which the file should have.
    pub missing: Vec<Missing>,
    /// Parameters without a key that were allowed to miss: they stay as they were initialised.
    pub fresh: Vec<Missing>,
    /// Keys without a parameter.
    pub unused: Vec<String>,
    /// Keys whose tensors have another shape than their parameters.
    pub misshapen: Vec<Misshapen>,
    /// Keys whose tensors hold no floating-point numbers, although their parameters need them.
    pub not_float: Vec<NotFloat>,
    /// Keys with NaN or infinite numbers.
    pub non_finite: Vec<NonFinite>,
    /// Parameters for which the file has several keys.
    pub repeated: Vec<Repeated>,
    /// Keys that should be copies of another tensor, and are not.
    pub untied: Vec<Untied>,
    /// Keys that repeat another tensor, as they may.
    pub tied: Vec<String>,
    /// Keys that hold no parameters, such as position numbers.
    pub ignored: Vec<String>,
}

/// A parameter without a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The parameter.
    pub parameter: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// A tensor of another shape than its parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misshapen {
    /// The key in the file.
    pub key: String,
    /// The parameter's shape.
    pub expected: Vec<usize>,
    /// The tensor's shape.
    pub got: Vec<usize>,
    /// What the reason may be.
    pub hint: Option<&'static str>,
}

/// A tensor without floating-point numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFloat {
    /// The key in the file.
    pub key: String,
    /// What it holds.
    pub dtype: StoredDType,
}

/// A tensor with numbers that are not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// The key in the file.
    pub key: String,
    /// How many of its numbers are NaN.
    pub nan: usize,
    /// How many are infinite.
    pub infinite: usize,
    /// How many there are in all.
    pub total: usize,
}

/// A parameter with several keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeated {
    /// The parameter.
    pub parameter: String,
    /// The keys.
    pub keys: Vec<String>,
}

/// A key that should be a copy of another and is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Untied {
    /// The key that should be a copy.
    pub copy: String,
    /// The key that it should be a copy of.
    pub original: String,
    /// How many numbers differ; `None` if even the shapes do.
    pub different: Option<usize>,
}

impl LoadReport {
    /// Whether there is nothing to tell: every parameter has its key, every key its parameter.
    pub fn is_clean(&self) -> bool {
        let Self {
            loaded: _,
            missing,
            fresh,
            unused,
            misshapen,
            not_float,
            non_finite,
            repeated,
            untied,
            tied: _,
            ignored: _,
        } = self;
        missing.is_empty()
            && fresh.is_empty()
            && unused.is_empty()
            && misshapen.is_empty()
            && not_float.is_empty()
            && non_finite.is_empty()
            && repeated.is_empty()
            && untied.is_empty()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} parameters loaded", self.loaded)?;
        list(f, "missing, so not in the file", &self.missing, |f, missing| {
            write!(f, "{} {:?}", missing.parameter, missing.shape)
        })?;
        list(f, "new, so not in the file and left as initialised", &self.fresh, |f, missing| {
            write!(f, "{} {:?}", missing.parameter, missing.shape)
        })?;
        list(f, "with a different shape than in the model", &self.misshapen, |f, misshapen| {
            write!(f, "{}: expected {:?}, got {:?}", misshapen.key, misshapen.expected, misshapen.got)?;
            misshapen.hint.map_or(Ok(()), |hint| write!(f, " ({hint})"))
        })?;
        list(f, "without floating-point numbers", &self.not_float, |f, not_float| {
            write!(f, "{}: {}", not_float.key, not_float.dtype)
        })?;
        list(f, "with numbers that are not finite", &self.non_finite, |f, non_finite| {
            let NonFinite { key, nan, infinite, total } = non_finite;
            write!(f, "{key}: {nan} NaN and {infinite} infinite of {total}")
        })?;
        list(f, "in the file more than once", &self.repeated, |f, repeated| {
            write!(f, "{}: as {}", repeated.parameter, repeated.keys.join(" and as "))
        })?;
        list(f, "not the copy that it should be", &self.untied, |f, untied| {
            write!(f, "{} is not {}: ", untied.copy, untied.original)?;
            match untied.different {
                Some(count) => write!(f, "{count} numbers differ"),
                None => f.write_str("another shape"),
            }
        })?;
        list(f, "in the file, but not used by this model", &self.unused, |f, key| f.write_str(key))?;
        if self.loaded == 0 && !self.missing.is_empty() {
            f.write_str("\nno key fits at all: is this a model of another family?")?;
        }
        Ok(())
    }
}

fn list<T>(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    items: &[T],
    show: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    write!(f, "\n{} {title}:", items.len())?;
    for item in items.iter().take(SHOWN) {
        f.write_str("\n  ")?;
        show(f, item)?;
    }
    match items.len().saturating_sub(SHOWN) {
        0 => Ok(()),
        more => write!(f, "\n  … and {more} more"),
    }
}
