//! What we build on: every crate's licence is one that we may ship, every crate comes from crates.io, and none is one that
//! we decided against. Of the crates that a build for this machine has; cargo knows them all.
//!
//! Deliberately not here: security advisories, whose database is elsewhere; CONTRIBUTING.md says how to look at it.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::Result;
use crate::workspace::{self, Workspace};

/// Licences that ask for no more than their text and the authors' names beside a binary (SPDX).
const ALLOWED: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    // The certificates of webpki-roots, which are data.
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Crates that we decided against, and why.
const BANNED: [(&str, &str); 8] = [
    ("openssl", "TLS is rustls: one binary, no system library"),
    ("openssl-sys", "TLS is rustls: one binary, no system library"),
    ("native-tls", "TLS is rustls: one binary, no system library"),
    ("aws-lc-sys", "it needs CMake; rustls uses ring"),
    ("onig", "regular expressions are fancy-regex, in Rust"),
    ("onig_sys", "regular expressions are fancy-regex, in Rust"),
    ("cmake", "a C compiler is all that a build needs besides Rust"),
    ("bindgen", "it needs libclang; a C compiler is all that a build needs besides Rust"),
];

/// The crates with native code or a claim on a symbol (`links`), all of which build with a C compiler alone.
const NATIVE: [&str; 3] = ["rayon-core", "ring", "zstd-sys"];

/// Crates of which others need more than one version, and how many. More versions are more code to build and to trust.
const TWICE: [(&str, usize); 6] =
    [("base64", 2), ("getrandom", 3), ("hashbrown", 2), ("rand", 2), ("rand_core", 2), ("syn", 2)];

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// What the rules look at in one crate.
#[derive(Clone, Debug, Default)]
struct Facts {
    name: String,
    version: String,
    licence: Option<String>,
    /// Where it comes from; `None` for a path.
    source: Option<String>,
    /// Whether it is ours.
    member: bool,
    links: Option<String>,
}

pub(crate) fn run(workspace: &Workspace) -> Result {
    let host = workspace.host()?;
    let metadata = workspace::metadata(&["--locked", "--filter-platform", &host])?;
    let crates = read(&metadata).ok_or("cargo metadata printed JSON of another form than expected")?;
    let problems = check(&crates);
    if problems.is_empty() {
        println!("{} crates keep the rules", crates.len());
        return Ok(());
    }
    Err(format!("dependencies break the rules (xtask/src/licences.rs):\n  {}", problems.join("\n  ")))
}

fn read(metadata: &Value) -> Option<Vec<Facts>> {
    let members = metadata["workspace_members"].as_array()?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let facts = metadata["packages"].as_array()?.iter().map(|package| {
        Some(Facts {
            name: text(&package["name"])?,
            version: text(&package["version"])?,
            licence: text(&package["license"]),
            source: text(&package["source"]),
            member: members.contains(&package["id"]),
            links: text(&package["links"]),
        })
    });
    facts.collect()
}

/// Everything that breaks a rule, one sentence each.
fn check(crates: &[Facts]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for Facts { name, version, licence, source, member, links } in crates {
        versions.entry(name).or_default().push(version);
        match licence {
            None => problems.push(format!("{name} {version} has no licence in its Cargo.toml")),
            Some(licence) => match is_allowed(licence) {
                Some(true) => {}
                Some(false) => problems.push(format!("{name} {version} is under {licence}, which is not allowed")),
                None => problems.push(format!("{name} {version} has a licence that cannot be read: {licence}")),
            },
        }
        let known = if *member { source.is_none() } else { source.as_deref() == Some(CRATES_IO) };
        if !known {
            let source = source.as_deref().unwrap_or("a directory");
            problems
                .push(format!("{name} {version} comes from {source}: only crates.io and the workspace may be used"));
        }
        if let Some((_, why)) = BANNED.iter().find(|(banned, _)| banned == name) {
            problems.push(format!("{name} {version} is banned: {why}; `cargo tree -i {name}` shows who wants it"));
        }
        if links.is_some() && !NATIVE.contains(&name.as_str()) {
            problems.push(format!("{name} {version} brings native code, and is not one of {}", NATIVE.join(", ")));
        }
    }
    for (name, versions) in versions {
        let most = TWICE.iter().find(|(twice, _)| *twice == name).map_or(1, |(_, most)| *most);
        if versions.len() > most {
            let versions = versions.join(", ");
            problems.push(format!("{name} is there more than {most} times ({versions}); `cargo tree -d` shows why"));
        }
    }
    problems
}

/// Whether a licence expression (SPDX, or the older form with `/`) can be met by allowed ones; `None` where it is not such
/// an expression. AND binds closer than OR.
fn is_allowed(expression: &str) -> Option<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let allowed = any(&mut rest)?;
    rest.is_empty().then_some(allowed)
}

fn any(words: &mut &[&str]) -> Option<bool> {
    let mut allowed = every(words)?;
    while let ["OR", rest @ ..] = *words {
        *words = rest;
        allowed |= every(words)?;
    }
    Some(allowed)
}

fn every(words: &mut &[&str]) -> Option<bool> {
    let mut allowed = one(words)?;
    while let ["AND", rest @ ..] = *words {
        *words = rest;
        allowed &= one(words)?;
    }
    Some(allowed)
}

fn one(words: &mut &[&str]) -> Option<bool> {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let allowed = any(words)?;
            let [")", rest @ ..] = *words else { return None };
            *words = rest;
            Some(allowed)
        }
        [")" | "AND" | "OR" | "WITH", ..] | [] => None,
        [licence, "WITH", exception, rest @ ..] => {
            *words = rest;
            Some(ALLOWED.contains(&format!("{licence} WITH {exception}").as_str()))
        }
        [licence, rest @ ..] => {
            *words = rest;
            Some(ALLOWED.contains(licence))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions() {
        for allowed in [
            "MIT",
            "MIT/Apache-2.0",
            "MIT OR GPL-3.0-only",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0-only",
            "GPL-2.0-only AND MIT OR Zlib",
        ] {
            assert_eq!(is_allowed(allowed), Some(true), "{allowed}");
        }
        for refused in [
            "GPL-3.0-only",
            "MIT AND MPL-2.0",
            "(MIT OR Apache-2.0) AND AGPL-3.0-only",
            "MIT WITH some-exception",
            "MIT-0",
        ] {
            assert_eq!(is_allowed(refused), Some(false), "{refused}");
        }
        for broken in ["", "MIT OR", "MIT Apache-2.0", "(MIT", "MIT)", "OR", "MIT WITH"] {
            assert_eq!(is_allowed(broken), None, "{broken}");
        }
    }

    /// The problems of a crate that keeps the rules but for one change.
    fn after(change: impl Fn(&mut Facts)) -> Vec<String> {
        let mut facts = Facts {
            name: "thing".to_owned(),
            version: "1.0.0".to_owned(),
            licence: Some("MIT".to_owned()),
            source: Some(CRATES_IO.to_owned()),
            ..Facts::default()
        };
        change(&mut facts);
        check(&[facts])
    }

    #[test]
    fn each_broken_rule_is_reported() {
        assert_eq!(after(|_| ()), [""; 0]);
        let member = |facts: &mut Facts| (facts.member, facts.source) = (true, None);
        assert_eq!(after(member), [""; 0]);
        assert_eq!(after(|facts| facts.licence = None), ["thing 1.0.0 has no licence in its Cargo.toml"]);
        assert_eq!(
            after(|facts| facts.licence = Some("GPL-3.0-only".to_owned())),
            ["thing 1.0.0 is under GPL-3.0-only, which is not allowed"]
        );
        assert_eq!(
            after(|facts| facts.licence = Some("MIT OR".to_owned())),
            ["thing 1.0.0 has a licence that cannot be read: MIT OR"]
        );
        for (source, shown) in [(Some("git+https://example.org/x"), "git+https://example.org/x"), (None, "a directory")]
        {
            let expected = format!("thing 1.0.0 comes from {shown}: only crates.io and the workspace may be used");
            assert_eq!(after(|facts| facts.source = source.map(str::to_owned)), [expected]);
        }
        let banned = after(|facts| facts.name = "openssl".to_owned());
        assert!(banned[0].starts_with("openssl 1.0.0 is banned: TLS is rustls"), "{banned:?}");
        let native = after(|facts| facts.links = Some("z".to_owned()));
        assert_eq!(native, ["thing 1.0.0 brings native code, and is not one of rayon-core, ring, zstd-sys"]);
    }

    #[test]
    fn versions_are_counted() {
        let of = |name: &str, version: &str| Facts {
            name: name.to_owned(),
            version: version.to_owned(),
            licence: Some("MIT".to_owned()),
            source: Some(CRATES_IO.to_owned()),
            ..Facts::default()
        };
        assert_eq!(check(&[of("rand", "0.9.0"), of("rand", "0.10.0")]), [""; 0]);
        assert_eq!(
            check(&[of("serde", "1.0.0"), of("serde", "2.0.0")]),
            ["serde is there more than 1 times (1.0.0, 2.0.0); `cargo tree -d` shows why"]
        );
    }
}
