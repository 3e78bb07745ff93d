//! The models that henson comes with, for commands that are given no model. They are directories like any other: in
//! `HENSON_MODELS`, next to the binary, in `../share/henson` of it, in henson's source tree around it or where it was built
//! from, or, with the build feature `embedded-model`, inside of it. Nothing is downloaded.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// A model by what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BuiltIn {
    /// A masked language model: to fill, to read features off, to fine-tune.
    General,
    /// The same, tuned for vectors of sentences.
    Sentences,
}

/// None of the places has it.
#[derive(Debug, thiserror::Error)]
#[error(
    "{name}, which comes with henson, was not found. Looked for {}, and in models/ of a source tree of henson around the \
     program. Set HENSON_MODELS to the directory that holds {name}, or name a model with --model DIR (or --model org/name, \
     which --download fetches); `henson demo` makes a small one in a few minutes",
    listed(places)
)]
pub(crate) struct NotFound {
    name: &'static str,
    places: Vec<PathBuf>,
}

fn listed(places: &[PathBuf]) -> String {
    places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(" and ")
}

impl BuiltIn {
    /// All of them, the one for most commands first.
    pub(crate) const ALL: [BuiltIn; 2] = [BuiltIn::General, BuiltIn::Sentences];

    /// The name of its directory.
    pub(crate) fn name(self) -> &'static str {
        match self {
            BuiltIn::General => "henson-12m",
            BuiltIn::Sentences => "henson-12m-sentences",
        }
    }

    /// The one of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|model| model.name() == name)
    }

    /// Its directory, or what to do where there is none.
    pub(crate) fn directory(self) -> anyhow::Result<PathBuf> {
        let program = std::env::current_exe().context("cannot find the path of this program; give a --model")?;
        let beside = program.parent().unwrap_or(Path::new("."));
        let places = places(beside, crate::models::set("HENSON_MODELS"), Path::new(SOURCE), self.name());
        if let Some(found) = places.iter().find(|place| place.join("config.json").is_file()) {
            return Ok(found.clone());
        }
        #[cfg(feature = "embedded-model")]
        if let Some(model) = embedded::Model::named(self.name()) {
            let cache = crate::models::own_cache().context(
                "there is nowhere to unpack the built-in model: set HOME or XDG_CACHE_HOME, or name a --model",
            )?;
            return model.unpack(&cache.join("models"));
        }
        Err(NotFound { name: self.name(), places }.into())
    }
}

/// The source tree that this program was built from, which may be gone or elsewhere by now.
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Where a model may be, the first place first. Where somebody `named` the directory of models, the tree that the program
/// was built from does not matter.
fn places(beside: &Path, named: Option<PathBuf>, source: &Path, name: &str) -> Vec<PathBuf> {
    let share = beside.parent().unwrap_or(beside).join("share/henson");
    // A directory above the program is only looked into where it is henson's own source: /models may be anybody's.
    let is_source = |tree: &&Path| tree.join("crates/henson/Cargo.toml").is_file();
    let built_from = Some(source).filter(|_| named.is_none()).filter(is_source);
    let trees = beside.ancestors().filter(is_source).chain(built_from).map(|tree| tree.join("models"));
    let installed = [beside, &share].map(|place| place.join("models"));
    named.into_iter().chain(installed).chain(trees).map(|models| models.join(name)).collect()
}

/// Models inside of the program. Weights are read from a file, so they are unpacked once, into the cache.
#[cfg(feature = "embedded-model")]
mod embedded {
    use std::path::{Path, PathBuf};

    use anyhow::Context;

    pub(super) struct Model {
        name: &'static str,
        /// Of all files, so that another version of henson finds its own.
        digest: &'static str,
        /// By their names, which may have a folder before them.
        files: &'static [(&'static str, &'static [u8])],
    }

    // `MODELS: &[Model]`, which build.rs writes.
    include!(concat!(env!("OUT_DIR"), "/embedded_models.rs"));

    impl Model {
        pub(super) fn named(name: &str) -> Option<&'static Self> {
            MODELS.iter().find(|model| model.name == name)
        }

        /// Writes what is not there yet, and gives the directory.
        pub(super) fn unpack(&self, cache: &Path) -> anyhow::Result<PathBuf> {
            let directory = cache.join(format!("{}-{}", self.name, self.digest));
            for (file, bytes) in self.files {
                let path = directory.join(file);
                if std::fs::metadata(&path).is_ok_and(|known| known.len() == bytes.len() as u64) {
                    continue;
                }
                let unwritten = || format!("cannot unpack the built-in model to {}", path.display());
                std::fs::create_dir_all(path.parent().unwrap_or(&directory)).with_context(unwritten)?;
                henson_checkpoint::write_atomic(&path, bytes).with_context(unwritten)?;
            }
            Ok(directory)
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn embedded_models_are_unpacked_once() {
            for built_in in super::super::BuiltIn::ALL {
                let model = Model::named(built_in.name()).unwrap();
                let cache = tempfile::TempDir::new().unwrap();
                let directory = model.unpack(cache.path()).unwrap();
                henson_checkpoint::ModelDirectory::open(&directory).unwrap().weights().unwrap();
                let written = |file: &str| std::fs::metadata(directory.join(file)).unwrap().modified().unwrap();
                let first = written("config.json");
                // A file that was cut short is mended, the others stay.
                std::fs::write(directory.join("tokenizer.json"), "").unwrap();
                assert_eq!(model.unpack(cache.path()).unwrap(), directory);
                assert_eq!(written("config.json"), first);
                for (file, bytes) in model.files {
                    assert!(std::fs::read(directory.join(file)).unwrap() == *bytes, "{file}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_found_in_order() {
        let root = tempfile::TempDir::new().unwrap();
        let at = |path: &str| root.path().join(path);
        let make = |path: &str| {
            std::fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            std::fs::write(at(path), "{}").unwrap();
        };
        let bin = at("src/target/release");
        let look = |named: Option<&str>| {
            let places = places(&bin, named.map(at), &at("built"), "m");
            let found = places.into_iter().find(|place| place.join("config.json").is_file());
            found.map(|path| path.strip_prefix(root.path()).unwrap().to_owned())
        };
        let found = || look(None);
        assert_eq!(found(), None);
        // Above the program, but in nobody's source tree.
        make("models/m/config.json");
        make("src/models/m/config.json");
        assert_eq!(found(), None);
        // Where it was built from, with a target directory elsewhere; not where that is somebody else's by now.
        make("built/models/m/config.json");
        assert_eq!(found(), None);
        make("built/crates/henson/Cargo.toml");
        assert_eq!(found(), Some("built/models/m".into()));
        assert_eq!(look(Some("nowhere")), None);
        make("src/crates/henson/Cargo.toml");
        assert_eq!(found(), Some("src/models/m".into()));
        make("src/target/share/henson/models/m/config.json");
        assert_eq!(found(), Some("src/target/share/henson/models/m".into()));
        // A directory without a model in it is skipped.
        std::fs::create_dir_all(bin.join("models/m")).unwrap();
        assert_eq!(found(), Some("src/target/share/henson/models/m".into()));
        make("src/target/release/models/m/config.json");
        assert_eq!(found(), Some("src/target/release/models/m".into()));
        assert_eq!(look(Some("nowhere")), Some("src/target/release/models/m".into()));
        assert_eq!(look(Some("models")), Some("models/m".into()));
    }
}
