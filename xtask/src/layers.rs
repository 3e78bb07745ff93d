//! Keeps the direction of dependencies: which crate may use which, who may be unsafe, who knows the tokenizers, and who knows
//! the families of models.
//! ARCHITECTURE.md says why. Development dependencies are free, except for `tokenizers`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::workspace::Workspace;

/// Each crate and the crates of the workspace that it may use.
const ALLOWED: [(&str, &[&str]); 13] = [
    ("henson-kernels", &[]),
    ("henson-ranks", &[]),
    ("henson-tensor", &["henson-kernels", "henson-ranks"]),
    ("henson-models", &["henson-tensor"]),
    ("henson-checkpoint", &["henson-models", "henson-tensor"]),
    ("henson-text", &["henson-kernels"]),
    ("henson-data", &["henson-kernels", "henson-text"]),
    (
        "henson-train",
        &[
            "henson-checkpoint",
            "henson-data",
            "henson-kernels",
            "henson-models",
            "henson-ranks",
            "henson-tensor",
            "henson-text",
        ],
    ),
    ("henson-infer", &["henson-checkpoint", "henson-models", "henson-tensor", "henson-text"]),
    ("henson-serve", &["henson-infer", "henson-tensor", "henson-text"]),
    (
        "henson-tasks",
        &[
            "henson-checkpoint",
            "henson-data",
            "henson-infer",
            "henson-kernels",
            "henson-models",
            "henson-ranks",
            "henson-tensor",
            "henson-text",
            "henson-train",
        ],
    ),
    (
        "henson",
        &[
            "henson-checkpoint",
            "henson-data",
            "henson-infer",
            "henson-kernels",
            "henson-models",
            "henson-ranks",
            "henson-serve",
            "henson-tasks",
            "henson-tensor",
            "henson-text",
            "henson-train",
        ],
    ),
    ("xtask", &[]),
];

/// Pairs that must not meet, not even through others: who serves a model shall not carry the code that trains it.
const APART: [(&str, &str); 1] = [("henson-infer", "henson-train")];

/// Crates from elsewhere that only one of ours may use.
const SOLE_USERS: [(&str, &str); 1] = [("tokenizers", "henson-text")];

/// Vector instructions, raw memory, and the functions of MPI. Everywhere else `unsafe` is forbidden.
const MAY_BE_UNSAFE: [&str; 3] = ["henson-kernels", "henson-ranks", "henson-tensor"];

/// The crate that knows families of models, and the file with the list of them.
const FAMILIES: (&str, &str) = ("henson-models", "families! {");

/// What the rules look at in one crate.
#[derive(Clone, Debug, Default)]
struct Facts {
    description: String,
    /// Dependencies of the crate itself, ours and others'.
    uses: BTreeSet<String>,
    /// Dependencies of its tests alone.
    tests_use: BTreeSet<String>,
    /// Whether lib.rs or main.rs forbids unsafe code.
    forbids_unsafe: bool,
}

pub(crate) fn run(workspace: &Workspace) -> Result {
    let mut crates = BTreeMap::new();
    for package in &workspace.packages {
        let mut facts = Facts { description: package.description.clone(), forbids_unsafe: true, ..Facts::default() };
        for dependency in &package.dependencies {
            let set = if dependency.dev { &mut facts.tests_use } else { &mut facts.uses };
            set.insert(dependency.name.clone());
        }
        for root in &package.roots {
            let text = fs::read_to_string(root).map_err(|error| format!("{}: {error}", root.display()))?;
            facts.forbids_unsafe &= text.lines().any(|line| line.trim() == "#![forbid(unsafe_code)]");
        }
        crates.insert(package.name.clone(), facts);
    }
    let mut problems = check(&crates);
    problems.extend(check_families(workspace)?);
    if problems.is_empty() {
        println!("{} crates keep the rules", crates.len());
        return Ok(());
    }
    Err(format!("the workspace breaks its rules (xtask/src/layers.rs):\n  {}", problems.join("\n  ")))
}

/// Everything that breaks a rule, one sentence each.
fn check(crates: &BTreeMap<String, Facts>) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, facts) in crates {
        match ALLOWED.iter().find(|(known, _)| known == name) {
            Some((_, allowed)) => {
                let ours = facts.uses.iter().filter(|used| crates.contains_key(*used));
                for used in ours.filter(|used| !allowed.contains(&used.as_str())) {
                    problems.push(format!("{name} must not depend on {used}"));
                }
            }
            None => problems.push(format!("{name} has no place in the table of allowed dependencies")),
        }
        for (crate_name, user) in SOLE_USERS {
            let used = facts.uses.contains(crate_name) || facts.tests_use.contains(crate_name);
            if used && name != user {
                problems.push(format!("{name} must not depend on {crate_name}: only {user} may"));
            }
        }
        if !facts.forbids_unsafe && !MAY_BE_UNSAFE.contains(&name.as_str()) {
            problems.push(format!("{name} must have #![forbid(unsafe_code)] at its root"));
        }
        if !is_one_sentence(&facts.description) {
            problems.push(format!("{name} needs a description of one sentence in its Cargo.toml"));
        }
    }
    for (user, used) in APART {
        if let Some(way) = way(crates, user, used) {
            problems.push(format!("{user} must never reach {used}, but does: {}", way.join(" → ")));
        }
    }
    for (name, _) in ALLOWED.iter().filter(|(name, _)| !crates.contains_key(*name)) {
        problems.push(format!("{name} is in the table of allowed dependencies but not in the workspace"));
    }
    problems
}

/// Where a crate other than `models` names a type of a family: a variant of `ModelConfig`, or a config of its own.
fn check_families(workspace: &Workspace) -> std::result::Result<Vec<String>, String> {
    let read = |path: &Path| fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()));
    let (home, list) = FAMILIES;
    let models = workspace.packages.iter().find(|package| package.name == home).ok_or("no crate of models")?;
    let root = models.roots.first().ok_or("models has no root")?;
    let names = family_names(&read(root)?, list);
    if names.is_empty() {
        return Err(format!("{}: no `{list}` with a family in it", root.display()));
    }
    let mut problems = Vec::new();
    for package in workspace.packages.iter().filter(|package| package.name != home && package.name != "xtask") {
        for source in package.roots.iter().filter_map(|root| root.parent()) {
            for path in sources(source)? {
                problems.extend(families_in(&read(&path)?, &names).map(|(line, name)| {
                    format!("{}:{line} names {name}: a family is known to {home} alone", path.display())
                }));
            }
        }
    }
    Ok(problems)
}

/// `Bert(bert::BertConfig, …)` → `ModelConfig::Bert` and `BertConfig`.
fn family_names(root: &str, list: &str) -> Vec<String> {
    let Some((_, rest)) = root.split_once(list) else { return Vec::new() };
    let lines = rest.lines().map(str::trim).take_while(|line| *line != "}");
    let rows = lines.filter_map(|line| line.strip_suffix("),")?.split_once('('));
    rows.flat_map(|(variant, types)| {
        let config = types.split(',').next().and_then(|path| path.rsplit("::").next()).unwrap_or_default();
        [format!("ModelConfig::{variant}"), config.to_owned()]
    })
    .collect()
}

/// Lines of a source that name a family, and what they name.
fn families_in<'a>(text: &'a str, names: &'a [String]) -> impl Iterator<Item = (usize, &'a str)> {
    let named = |line: &str, name: &str| {
        line.match_indices(name).any(|(at, _)| {
            let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
            !is_part(line[..at].chars().next_back()) && !is_part(line[at + name.len()..].chars().next())
        })
    };
    text.lines().enumerate().flat_map(move |(i, line)| {
        names.iter().filter(move |name| named(line, name)).map(move |name| (i + 1, name.as_str()))
    })
}

/// All sources below a directory.
fn sources(directory: &Path) -> std::result::Result<Vec<PathBuf>, String> {
    let error = |error: std::io::Error| format!("{}: {error}", directory.display());
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).map_err(error)? {
        let path = entry.map_err(error)?.path();
        if path.is_dir() {
            all.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

fn is_one_sentence(text: &str) -> bool {
    text.ends_with('.') && !text.contains(". ") && !text.contains('\n')
}

/// A chain of dependencies from one crate to another.
fn way(crates: &BTreeMap<String, Facts>, from: &str, to: &str) -> Option<Vec<String>> {
    let mut ways = vec![vec![from.to_owned()]];
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop() {
        let end = &way[way.len() - 1];
        if end == to {
            return Some(way);
        }
        if let (true, Some(facts)) = (seen.insert(end.clone()), crates.get(end)) {
            ways.extend(facts.uses.iter().map(|next| [way.as_slice(), std::slice::from_ref(next)].concat()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A workspace that uses all that it may.
    fn sound() -> BTreeMap<String, Facts> {
        let facts = |name: &str, allowed: &[&str]| Facts {
            description: "What it is.".to_owned(),
            uses: allowed.iter().map(|name| (*name).to_owned()).collect(),
            tests_use: BTreeSet::from(["proptest".to_owned()]),
            forbids_unsafe: !MAY_BE_UNSAFE.contains(&name),
        };
        let mut crates: BTreeMap<String, Facts> =
            ALLOWED.iter().map(|(name, allowed)| ((*name).to_owned(), facts(name, allowed))).collect();
        crates.get_mut("henson-text").unwrap().uses.insert("tokenizers".to_owned());
        crates
    }

    /// The problems of the sound workspace after one change to one crate.
    fn after(name: &str, change: impl Fn(&mut Facts)) -> Vec<String> {
        let mut crates = sound();
        change(crates.entry(name.to_owned()).or_default());
        check(&crates)
    }

    #[test]
    fn names_of_families_are_found() {
        let root = "mod bert;\nfamilies! {\n    /// BERT.\n    Bert(bert::BertConfig, bert::FAMILY),\n    /// MPNet.\n    \
                    MpNet(mpnet::MpNetConfig, mpnet::FAMILY),\n}\n";
        let names = family_names(root, FAMILIES.1);
        assert_eq!(names, ["ModelConfig::Bert", "BertConfig", "ModelConfig::MpNet", "MpNetConfig"]);
        let text =
            "let x = ModelConfig::from_value(json);\nif let ModelConfig::Bert(own) = x {}\nMyBertConfig\n&MpNetConfig)";
        let found: Vec<_> = families_in(text, &names).collect();
        assert_eq!(found, [(2, "ModelConfig::Bert"), (4, "MpNetConfig")]);
    }

    #[test]
    fn what_is_allowed_passes() {
        assert_eq!(check(&sound()), [""; 0]);
    }

    #[test]
    fn each_broken_rule_is_told() {
        let uses = |name: &str, used: &'static str| {
            after(name, |facts| {
                facts.uses.insert(used.to_owned());
            })
        };
        assert_eq!(uses("henson-kernels", "henson-tensor"), ["henson-kernels must not depend on henson-tensor"]);
        assert_eq!(uses("henson-models", "henson-kernels"), ["henson-models must not depend on henson-kernels"]);
        assert_eq!(
            uses("henson-infer", "henson-train"),
            [
                "henson-infer must not depend on henson-train",
                "henson-infer must never reach henson-train, but does: henson-infer → henson-train",
            ]
        );
        assert_eq!(
            uses("henson-infer", "tokenizers"),
            ["henson-infer must not depend on tokenizers: only henson-text may"]
        );
        assert_eq!(
            after("henson-train", |facts| _ = facts.tests_use.insert("tokenizers".to_owned())),
            ["henson-train must not depend on tokenizers: only henson-text may"]
        );
        assert_eq!(
            after("henson-models", |facts| facts.forbids_unsafe = false),
            ["henson-models must have #![forbid(unsafe_code)] at its root"]
        );
        for description in ["", "no full stop", "Two. Sentences."] {
            assert_eq!(
                after("xtask", |facts| facts.description = description.to_owned()),
                ["xtask needs a description of one sentence in its Cargo.toml"]
            );
        }
    }

    #[test]
    fn a_way_through_others_is_found() {
        let mut crates = sound();
        crates.get_mut("henson-checkpoint").unwrap().uses.insert("henson-train".to_owned());
        let problems = check(&crates);
        assert_eq!(problems[0], "henson-checkpoint must not depend on henson-train");
        assert!(problems[1].starts_with("henson-infer must never reach henson-train, but does: "), "{problems:?}");
        assert!(problems[1].ends_with("henson-checkpoint → henson-train"), "{problems:?}");
    }

    #[test]
    fn tests_may_use_any_crate_of_ours() {
        assert_eq!(after("henson-tensor", |facts| _ = facts.tests_use.insert("henson-train".to_owned())), [""; 0]);
    }

    #[test]
    fn crates_and_table_name_each_other() {
        let facts = Facts { description: "New.".to_owned(), forbids_unsafe: true, ..Facts::default() };
        assert_eq!(
            after("henson-new", |new| *new = facts.clone()),
            ["henson-new has no place in the table of allowed dependencies"]
        );
        let mut crates = sound();
        crates.remove("henson");
        assert_eq!(check(&crates), ["henson is in the table of allowed dependencies but not in the workspace"]);
    }
}
