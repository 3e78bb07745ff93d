//! Runs the commands that the documents show, and checks that their links lead somewhere, so that neither drifts from
//! what the program does.
//!
//! A fenced block with the info string `sh test` is run line by line, each line as a command of its own in the
//! workspace's root. The program that the tests use is first on the PATH, `$MINILM` is the directory of all-MiniLM-L6-v2 and `$TMP`
//! an empty directory for results.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::workspace::Workspace;
use crate::{Result, minilm};

/// Documents whose commands are run.
const WITH_COMMANDS: [&str; 3] = ["README.md", "docs/commands.md", "docs/tutorial.md"];

/// Folders whose documents have their links checked.
const WITH_LINKS: [&str; 3] = [".", "docs", "tools/golden"];

/// Lines of a failed command's output that are shown.
const SHOWN: usize = 40;

pub(crate) fn run(workspace: &Workspace) -> Result {
    check_links(&workspace.root)?;
    let mut commands = Vec::new();
    for document in WITH_COMMANDS {
        let path = workspace.root.join(document);
        let text = fs::read_to_string(&path).map_err(|error| format!("{document}: {error}"))?;
        for (line, command) in commands_of(&text).map_err(|error| format!("{document}:{error}"))? {
            commands.push((format!("{document}:{line}"), command));
        }
    }
    if commands.is_empty() {
        return Err("no document has a block marked `sh test`".to_owned());
    }
    minilm::run(workspace)?;
    let program = workspace.build()?;

    let results = workspace.target.join("readme");
    if results.exists() {
        fs::remove_dir_all(&results).map_err(|error| format!("{}: {error}", results.display()))?;
    }
    fs::create_dir_all(&results).map_err(|error| format!("{}: {error}", results.display()))?;
    let path = path_with(&program)?;
    for (place, command) in &commands {
        println!("{place}: {command}");
        let start = Instant::now();
        let output = Command::new("bash")
            .args(["-euo", "pipefail", "-c", command])
            .current_dir(&workspace.root)
            .env("PATH", &path)
            .env("MINILM", minilm::directory(workspace))
            .env("TMP", &results)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("cannot run bash: {error}"))?;
        if !output.status.success() {
            let said = [tail(&output.stdout), tail(&output.stderr)].concat();
            return Err(format!("{place}: `{command}` failed ({}) and said:\n{said}", output.status));
        }
        println!("    {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// The commands of all blocks that are marked for it, with the number of the line where each begins. A backslash at
/// the end of a line joins it with the next; empty lines and comments are left out.
fn commands_of(text: &str) -> Result<Vec<(usize, String)>> {
    let mut commands = Vec::new();
    // Where the block that we are in begins, and whether it is one of ours.
    let mut block: Option<(usize, bool)> = None;
    let mut joined: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let trimmed = line.trim();
        match (block, trimmed.strip_prefix("```")) {
            (None, Some(info)) => {
                let mut words = info.split_whitespace();
                block = Some((number, words.next() == Some("sh") && words.any(|word| word == "test")));
            }
            (Some(_), Some("")) => {
                if let Some((number, _)) = joined {
                    return Err(format!("{number}: the block ends with a backslash"));
                }
                block = None;
            }
            (Some((_, true)), _) => {
                if joined.is_none() && (trimmed.is_empty() || trimmed.starts_with('#')) {
                    continue;
                }
                let (start, mut command) = joined.take().unwrap_or((number, String::new()));
                match trimmed.strip_suffix('\\') {
                    Some(part) => {
                        command += part;
                        joined = Some((start, command));
                    }
                    None => commands.push((start, command + trimmed)),
                }
            }
            _ => {}
        }
    }
    match block {
        Some((number, _)) => Err(format!("{number}: the block has no end")),
        None => Ok(commands),
    }
}

/// The targets of links outside of code, without those to other sites and within the document.
fn links_of(text: &str) -> Vec<String> {
    let mut links = Vec::new();
    let mut inside_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            inside_block = !inside_block;
        }
        if inside_block {
            continue;
        }
        for part in line.split("](").skip(1) {
            let target = part.split([')', '#', ' ']).next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:") {
                links.push(target.to_owned());
            }
        }
    }
    links
}

fn check_links(root: &Path) -> Result {
    let mut broken = Vec::new();
    for folder in WITH_LINKS.map(|folder| root.join(folder)) {
        let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            let dead = links_of(&text).into_iter().filter(|target| !folder.join(target).exists());
            let document = path.strip_prefix(root).unwrap_or(&path).display();
            broken.extend(dead.map(|target| format!("{document} links to {target}, which is not there")));
        }
    }
    broken.sort();
    if broken.is_empty() { Ok(()) } else { Err(broken.join("\n")) }
}

fn path_with(first: &Path) -> Result<OsString> {
    let rest = std::env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(first.to_owned()).chain(std::env::split_paths(&rest));
    std::env::join_paths(all).map_err(|error| format!("PATH: {error}"))
}

fn tail(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN)..].iter().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_marked_blocks_are_run() {
        let text = "\
Some text.

```sh test
# a comment
first --flag

second \\
    --more
```

```sh
not this
```

```text test
nor this
```

```sh test
third
```
";
        let expected = [(5, "first --flag"), (7, "second --more"), (20, "third")];
        assert_eq!(commands_of(text).unwrap(), expected.map(|(line, command)| (line, command.to_owned())));
    }

    #[test]
    fn broken_blocks_are_errors() {
        assert_eq!(commands_of("text\n```sh test\ncommand\n").unwrap_err(), "2: the block has no end");
        assert_eq!(commands_of("```sh test\ncommand \\\n```\n").unwrap_err(), "2: the block ends with a backslash");
    }

    #[test]
    fn links_within_the_project_are_found() {
        let text =
            "[a](docs/a.md#part) and [b](https://example.org/b), [c](#c)\n```\n[d](d.md)\n```\n- [e](../e \"E\")";
        assert_eq!(links_of(text), ["docs/a.md", "../e"]);
    }
}
