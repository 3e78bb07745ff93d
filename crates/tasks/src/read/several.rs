//! Several files as one set, by their names or by patterns.

use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Files, Reading, read};
use crate::error::TaskError;
use crate::example::{Input, Set};
use crate::task::names_in;

/// Names of files, in which a `*` stands for anything and a `?` for one character of the last part. In recipes a name, or a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[schemars(with = "Vec<String>")]
pub struct Paths(pub Vec<String>);

impl Paths {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(String::is_empty)
    }

    /// The files themselves, each once; those of a pattern are sorted.
    pub fn find(&self) -> Result<Vec<PathBuf>, TaskError> {
        let mut found: Vec<PathBuf> = Vec::new();
        for name in &self.0 {
            let path = PathBuf::from(name);
            let pattern = path.file_name().and_then(|name| name.to_str()).filter(|name| name.contains(['*', '?']));
            let all = match pattern {
                Some(pattern) if !path.exists() => {
                    let place = path.parent().filter(|place| !place.as_os_str().is_empty());
                    let names = names_in(place.unwrap_or(Path::new(".")));
                    let fit = names.iter().filter(|name| fits(pattern.as_bytes(), name.as_bytes()));
                    fit.map(|name| path.with_file_name(name)).collect()
                }
                _ => vec![path],
            };
            if all.is_empty() {
                return Err(TaskError::NoMatch { pattern: name.clone() });
            }
            for path in all {
                if !found.contains(&path) {
                    found.push(path);
                }
            }
        }
        Ok(found)
    }

    /// Reads all files as one set, whose labels are those of all of them.
    pub(crate) fn read(&self, reading: &Reading) -> Result<Set, TaskError> {
        let paths = self.find()?;
        let mut sets = paths.iter().map(|path| read(path, reading)).collect::<Result<Vec<_>, _>>()?;
        if sets.len() == 1 {
            return Ok(sets.remove(0));
        }
        let mut labels: Vec<String> = Vec::new();
        for label in sets.iter().flat_map(|set| &set.labels) {
            if !labels.contains(label) {
                labels.push(label.clone());
            }
        }
        if sets.iter().any(|set| set.labels != labels) {
            sort_labels(&mut labels);
            let files = Files { labels: labels.clone(), ..reading.files.clone() };
            let reading = Reading { files, ..reading.clone() };
            for (set, path) in sets.iter_mut().zip(&paths).filter(|(set, _)| set.labels != labels) {
                *set = read(path, &reading)?;
            }
        }
        let Some(first) = sets.first() else { return Err(TaskError::NoMatch { pattern: self.to_string() }) };
        let mut joined = Set { path: PathBuf::from(self.to_string()), ..first.without_examples() };
        let labelled = sets.iter().any(Set::is_labelled);
        if let Some(set) = sets.iter().find(|set| set.is_labelled() != labelled) {
            return Err(TaskError::NoLabels {
                path: set.path.clone(),
                needed: "the other files to train on have some",
            });
        }
        (joined.skipped, joined.undecided) = (0, 0);
        joined.problems.clear();
        let mut documents = 0;
        for set in sets {
            let name = set.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let before = documents;
            for mut example in set.examples {
                example.place = format!("{name}, {}", example.place);
                if let Input::Words { document, .. } = &mut example.input {
                    *document += before;
                    documents = documents.max(*document + 1);
                }
                joined.examples.push(example);
            }
            joined.skipped += set.skipped;
            joined.undecided += set.undecided;
            joined.problems.extend(set.problems);
        }
        Ok(joined)
    }
}

impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

impl<T: Into<String>> From<T> for Paths {
    fn from(name: T) -> Self {
        Self(vec![name.into()])
    }
}

impl Serialize for Paths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [] => serializer.serialize_str(""),
            [one] => serializer.serialize_str(one),
            several => several.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Paths {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected the name of a file, or a list of names")]
        enum Written {
            One(String),
            Several(Vec<String>),
        }
        Ok(match Written::deserialize(deserializer)? {
            Written::One(name) if name.is_empty() => Self::default(),
            Written::One(name) => Self(vec![name]),
            Written::Several(names) => Self(names),
        })
    }
}

/// Whether a name is that of a pattern.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    match pattern {
        [] => name.is_empty(),
        [b'*', rest @ ..] => (0..=name.len()).any(|taken| fits(rest, &name[taken..])),
        [b'?', rest @ ..] => !name.is_empty() && fits(rest, &name[1..]),
        [letter, rest @ ..] => name.first() == Some(letter) && fits(rest, &name[1..]),
    }
}

/// By their values where all are whole numbers, else by their letters: as readers do.
pub(crate) fn sort_labels(labels: &mut [String]) {
    match labels.iter().map(|label| label.parse().ok()).collect::<Option<Vec<i64>>>() {
        Some(_) => labels.sort_by_key(|label| (label.parse::<i64>().unwrap_or(0), label.clone())),
        None => labels.sort(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_names() {
        for (pattern, name, expected) in [
            ("*.csv", "a.csv", true),
            ("*.csv", "a.csv.gz", false),
            ("a*b*c", "a-b-b-c", true),
            ("part-??.tsv", "part-07.tsv", true),
            ("part-??.tsv", "part-7.tsv", false),
        ] {
            assert_eq!(fits(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn labels_are_sorted_as_readers_do() {
        let sorted = |labels: &[&str]| {
            let mut labels: Vec<String> = labels.iter().map(|label| (*label).to_owned()).collect();
            sort_labels(&mut labels);
            labels
        };
        assert_eq!(sorted(&["10", "9", "-1"]), ["-1", "9", "10"]);
        assert_eq!(sorted(&["b", "10", "9"]), ["10", "9", "b"]);
    }
}
