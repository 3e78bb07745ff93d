//! A family of models as data: its names, its classes in `transformers`, its sizes. Nothing outside of this crate names one.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{ConfigError, FAMILIES, Head, ModelConfig, Naming};

/// The one list of families: for each a variant of [`ModelConfig`], its config, and its [`Family`].
macro_rules! families {
    ($($(#[$doc:meta])* $name:ident($config:ty, $family:path),)*) => {
        /// The sizes and settings of a network: config.json as its `model_type` has it.
        #[derive(Clone, Debug, PartialEq)]
        pub enum ModelConfig {
            $($(#[$doc])* $name($config),)*
        }

        /// All families.
        pub static FAMILIES: &[&Family] = &[$(&$family),*];

        impl ModelConfig {
            fn own(&self) -> &dyn config::FamilyConfig {
                match self { $(Self::$name(config) => config,)* }
            }

            fn own_mut(&mut self) -> &mut dyn config::FamilyConfig {
                match self { $(Self::$name(config) => config,)* }
            }
        }
    };
}

/// The heads of a family: those named, then those of tasks, which all encoders have.
macro_rules! heads {
    ($($own:ident),*) => {
        &[
            $(Head::$own,)*
            Head::Sequence { labels: 0 },
            Head::Token { labels: 0 },
            Head::Span,
            Head::Choice,
        ]
    };
}

/// The name of a size, and what makes its config.
pub type NamedSize = (&'static str, fn() -> ModelConfig);

/// Models of one architecture.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in config.json, and how the names of its classes in `transformers` begin: (`bert`, `Bert`).
    pub types: &'static [(&'static str, &'static str)],
    /// The names in checkpoints.
    pub naming: Naming,
    /// The heads that it has, the one without any task first; labels do not count here.
    pub heads: &'static [Head],
    /// The ending of the class for left-to-right models, such as `LMHeadModel`, where there is one.
    pub causal: Option<&'static str>,
    /// Heads whose classes end otherwise than most families', and how.
    pub endings: &'static [(Head, &'static str)],
    /// Names of sizes, the smallest first, with the config of each.
    pub sizes: &'static [NamedSize],
    /// Reads a config.json of one of its types.
    pub(crate) parse: fn(Value) -> Result<ModelConfig, ConfigError>,
}

/// Arrays by name: sizes and numbers.
pub type Arrays = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// How models of a family were published before there were directories of config.json and model.safetensors.
#[derive(Debug)]
pub struct Original {
    /// `model_type` in config.json, which their own config does not say.
    pub model_type: &'static str,
    /// The name of their config.
    pub config: &'static str,
    /// How the name of the HDF5 file with their weights ends.
    pub weights: &'static str,
    /// Their arrays under today's names and in today's shapes, or what is wrong with them.
    pub convert: fn(Arrays) -> Result<Arrays, String>,
}

impl Family {
    /// The family with a `model_type`.
    pub fn of_type(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().copied().find(|family| family.types.iter().any(|(name, _)| *name == model_type))
    }

    /// The config of a named size.
    pub fn config_of_size(name: &str) -> Result<ModelConfig, ConfigError> {
        let mut sizes = FAMILIES.iter().flat_map(|family| family.sizes);
        let found = sizes.find(|(size, _)| *size == name);
        found.map(|(_, config)| config()).ok_or_else(|| ConfigError::Size(name.to_owned()))
    }

    /// The names of all sizes, for messages; those of a grid of layers and widths by its corners alone.
    pub fn size_names() -> String {
        let names = FAMILIES.iter().flat_map(|family| family.sizes).map(|(name, _)| *name);
        let (grid, mut names): (Vec<&str>, Vec<&str>) = names.partition(|name| name.contains("-L"));
        let corners = grid.first().zip(grid.last()).map(|(first, last)| format!("{first} to {last}"));
        names.extend(corners.as_deref());
        names.join(", ")
    }

    /// The names of sizes that detect replaced tokens, for messages.
    pub(crate) fn detector_names() -> String {
        let detectors = FAMILIES.iter().filter(|family| family.has_head(Head::ReplacedTokens));
        let names: Vec<&str> = detectors.flat_map(|family| family.sizes).map(|(name, _)| *name).collect();
        names.join(", ")
    }

    /// The model types of families with a head, for messages.
    pub fn types_with_head(head: Head) -> String {
        let families = FAMILIES.iter().filter(|family| family.has_head(head));
        let names: Vec<&str> = families.flat_map(|family| family.types).map(|(name, _)| *name).collect();
        names.join(", ")
    }

    /// All model types, for messages.
    pub(crate) fn type_names() -> String {
        let names: Vec<&str> = FAMILIES.iter().flat_map(|family| family.types).map(|(name, _)| *name).collect();
        names.join(", ")
    }

    /// The whole model without a head: with its pooler, where the family has one.
    pub fn bare_head(&self) -> Head {
        self.heads[0]
    }

    /// What is pre-trained: next sentence as well, where the family has it.
    pub fn pretraining_head(&self) -> Head {
        let written = if self.has_head(Head::Seq2Seq) { Head::Seq2Seq } else { Head::MaskedLm };
        if self.has_head(Head::PreTraining) { Head::PreTraining } else { written }
    }

    /// Whether it has a head of this kind.
    pub fn has_head(&self, head: Head) -> bool {
        self.heads.iter().any(|own| own.is_like(head))
    }

    /// The head that a class of `transformers` has, where it is one of this family's. `labels` is for those that have labels.
    pub fn head_of_class(&self, class: &str, labels: usize) -> Option<Head> {
        let ending = self.types.iter().find_map(|(_, prefix)| class.strip_prefix(prefix))?;
        if self.causal == Some(ending) {
            return Some(Head::MaskedLm);
        }
        let own = self.heads.iter().find(|head| self.ending(**head) == ending)?;
        Some(own.with_labels(labels))
    }

    /// The class of `transformers` with the parameters of a model.
    pub(crate) fn class(&self, model_type: &str, head: Head, causal: bool) -> String {
        let prefix =
            self.types.iter().find(|(name, _)| *name == model_type).map_or(self.types[0].1, |(_, prefix)| prefix);
        let ending = match self.causal {
            Some(ending) if causal && head == Head::MaskedLm => ending,
            _ => self.ending(head),
        };
        format!("{prefix}{ending}")
    }

    /// How the names of classes with a head end.
    fn ending(&self, head: Head) -> &'static str {
        let own = self.endings.iter().find(|(other, _)| other.is_like(head));
        own.map_or(head.class_ending(), |(_, ending)| ending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_and_class_is_found_again() {
        for &family in FAMILIES {
            for (name, config) in family.sizes {
                let config = config();
                assert_eq!(Family::config_of_size(name).unwrap(), config, "{name}");
                assert_eq!(ModelConfig::from_value(config.to_json().unwrap()).unwrap(), config, "{name}");
                for head in family.heads {
                    let class = config.class(head.with_labels(3));
                    let found = family.head_of_class(&class, 3).unwrap();
                    // A bare encoder is the same class with or without its pooler, and what an objective adds is not saved.
                    let shared = [Head::Encoder, Head::SpanBoundary].contains(head);
                    assert!(found == head.with_labels(3) || shared, "{class}");
                }
            }
            for (model_type, _) in family.types {
                assert!(std::ptr::eq(Family::of_type(model_type).unwrap(), family));
            }
        }
        let error = Family::config_of_size("bert-huge").unwrap_err().to_string();
        assert!(error.contains("bert-tiny") && error.contains("bert-huge"), "{error}");
    }

    #[test]
    fn keys_of_families_with_wrong_types_are_refused() {
        let cases = [
            ("electra-small", "summary_last_dropout", Value::from("some")),
            ("electra-small", "embedding_size", Value::from(-3)),
            ("albert-base", "classifier_dropout_prob", Value::from(true)),
            ("albert-base", "num_hidden_groups", Value::from(13)),
            ("mpnet-base", "max_position_embeddings", Value::from(2)),
        ];
        for (size, key, value) in cases {
            let mut json = Family::config_of_size(size).unwrap().to_json().unwrap();
            json[key] = value;
            let error = ModelConfig::from_value(json).unwrap_err().to_string();
            assert!(error.contains(key), "{size}: {error}");
        }
    }
}
