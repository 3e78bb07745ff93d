//! The workspace as cargo sees it, and the running of commands in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::Result;

/// Where things are, and the crates.
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) packages: Vec<Package>,
}

/// A crate of the workspace.
#[derive(Default)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) dependencies: Vec<Dependency>,
    /// lib.rs or main.rs.
    pub(crate) roots: Vec<PathBuf>,
}

/// A crate that another one uses.
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// Only for tests and examples.
    pub(crate) dev: bool,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self> {
        let metadata = metadata(&["--no-deps"])?;
        Self::read(&metadata).ok_or_else(|| "cargo metadata printed JSON of another form than expected".to_owned())
    }

    fn read(metadata: &Value) -> Option<Self> {
        let text = |value: &Value| Some(value.as_str()?.to_owned());
        let mut packages = Vec::new();
        for package in metadata["packages"].as_array()? {
            let mut read = Package {
                name: text(&package["name"])?,
                description: package["description"].as_str().unwrap_or_default().to_owned(),
                ..Package::default()
            };
            for dependency in package["dependencies"].as_array()? {
                let dev = dependency["kind"] == "dev";
                read.dependencies.push(Dependency { name: text(&dependency["name"])?, dev });
            }
            for target in package["targets"].as_array()? {
                if target["kind"].as_array()?.iter().any(|kind| kind == "lib" || kind == "bin") {
                    read.roots.push(text(&target["src_path"])?.into());
                }
            }
            packages.push(read);
        }
        let root = text(&metadata["workspace_root"])?.into();
        Some(Self { root, target: text(&metadata["target_directory"])?.into(), packages })
    }

    /// The target that the compiler builds for unless told otherwise.
    pub(crate) fn host(&self) -> Result<String> {
        let version = output(Command::new("rustc").arg("-vV").current_dir(&self.root))?;
        let host = version.lines().find_map(|line| line.strip_prefix("host: "));
        host.map(str::to_owned).ok_or_else(|| format!("rustc -vV names no host:\n{version}"))
    }

    /// The directory of the program as the tests use it. It is built with them, so that `ci` compiles it once; a release build
    /// with its optimisation across crates takes as long as all tests, and does the same.
    pub(crate) fn build(&self) -> Result<PathBuf> {
        succeed(&mut self.cargo(&["test", "--workspace", "--no-run"]))?;
        Ok(self.target.join("debug"))
    }

    /// A cargo command in the workspace's root.
    pub(crate) fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = cargo();
        command.args(arguments).current_dir(&self.root).stdin(Stdio::null());
        command
    }
}

/// What cargo knows about the workspace.
pub(crate) fn metadata(options: &[&str]) -> Result<Value> {
    let mut cargo = cargo();
    cargo.args(["metadata", "--format-version", "1"]).args(options).current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = output(&mut cargo)?;
    serde_json::from_str(&output).map_err(|error| format!("cargo metadata printed something else than JSON: {error}"))
}

/// The cargo that runs this program.
fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs a command whose output people see; an error where it fails.
pub(crate) fn succeed(command: &mut Command) -> Result {
    let name = describe(command);
    let status = command.status().map_err(|error| format!("cannot run `{name}`: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("`{name}` failed ({status})")) }
}

/// What a command prints; an error with its messages where it fails.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = describe(command);
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("cannot run `{name}`: {error}"))?;
    if !output.status.success() {
        return Err(format!("`{name}` failed: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    String::from_utf8(output.stdout).map_err(|_| format!("`{name}` printed something else than text"))
}

/// Program and arguments, as they could be typed.
fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    command.get_args().fold(program, |text, argument| format!("{text} {}", argument.to_string_lossy()))
}
