//! The files of packaging/ for clusters: they parse, keep to the conventions of what reads them, and call the program with flags that it
//! has. No Slurm and no Kubernetes is needed; what these would do with the files is not tried.
#![cfg(target_os = "linux")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Map, Value};
use tempfile::TempDir;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name)
}

/// The binary with variables, and without those of whoever runs the tests.
fn henson(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.args(arguments).env_clear().envs(variables.iter().copied());
    command.output().unwrap()
}

fn script(directory: &TempDir, name: &str, text: &str) {
    let path = directory.path().join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs the batch script with an `srun` that ends with a code; gives the script's code, srun's arguments, and scontrol's.
fn sbatch(name: &str, srun_ends: i32) -> (Option<i32>, Vec<String>, String) {
    sbatch_again(name, srun_ends, "0")
}

/// The same after the job was started again so many times.
fn sbatch_again(name: &str, srun_ends: i32, restarts: &str) -> (Option<i32>, Vec<String>, String) {
    let place = TempDir::new().unwrap();
    script(&place, "srun", &format!("printf '%s\\n' \"$@\" > srun.txt; exit {srun_ends}"));
    script(&place, "scontrol", "echo \"$@\" > scontrol.txt");
    let path = format!("{}:/usr/bin:/bin", place.path().display());
    let mut command = Command::new("bash");
    command.arg(file(name)).current_dir(place.path()).env_clear();
    let slurm = [("SLURM_CPUS_PER_TASK", "8"), ("SLURM_JOB_ID", "41"), ("SLURM_RESTART_COUNT", restarts)];
    let ended = command.env("PATH", &path).envs(slurm).output().unwrap();
    let read = |name: &str| std::fs::read_to_string(place.path().join(name)).unwrap_or_default();
    (ended.status.code(), read("srun.txt").lines().map(str::to_owned).collect(), read("scontrol.txt"))
}

#[test]
fn the_batch_scripts_run_and_requeue_after_a_loss() {
    batch_script("henson.sbatch", &["--mpi=pmix"]);
    batch_script("henson-gpus.sbatch", &[]);
}

fn batch_script(name: &str, of_srun: &[&str]) {
    let checked = Command::new("bash").arg("-n").arg(file(name)).output().unwrap();
    assert!(checked.status.success() && checked.stderr.is_empty(), "{}", String::from_utf8_lossy(&checked.stderr));
    let text = std::fs::read_to_string(file(name)).unwrap();
    let options: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("#SBATCH ")).collect();
    let known = [
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "cpus-per-task",
        "time",
        "requeue",
        "open-mode",
        "signal",
    ];
    assert!(!options.is_empty());
    for option in &options {
        let option = option.strip_prefix("--").unwrap().split('=').next().unwrap();
        assert!(known.contains(&option), "#SBATCH --{option} is not an option that was looked up");
    }
    // Only comments and options may stand before the first command: sbatch stops reading there.
    let first = text.lines().position(|line| !line.starts_with('#')).unwrap();
    assert!(text.lines().skip(first).all(|line| !line.starts_with("#SBATCH")));

    let (code, arguments, requeued) = sbatch(name, 0);
    assert_eq!((code, &*requeued), (Some(0), ""));
    let program = arguments.iter().position(|argument| argument == "henson").unwrap();
    assert_eq!(arguments[..program], *of_srun);
    // As many parts as processes, by its own defaults.
    let number =
        |name: &str| -> usize { options.iter().find_map(|option| option.strip_prefix(name)).unwrap().parse().unwrap() };
    let processes = number("--nodes=") * number("--ntasks-per-node=");
    assert!(arguments.contains(&format!("accumulation={processes}")), "{arguments:?}");
    understood(&arguments[program + 1..]);
    // A lost rank: again from the checkpoint. Anything else is for people to see.
    // A killed one is all that srun tells of, even where the others end with 75.
    for (code, requeued) in [(75, "requeue 41\n"), (137, "requeue 41\n"), (1, ""), (130, "")] {
        let (ended, _, asked) = sbatch(name, code);
        assert_eq!((ended, &*asked), (Some(code), requeued));
    }
    assert_eq!(sbatch_again(name, 75, "10").2, "");
}

/// Demands that the program knows all of the flags; the files are not here.
#[track_caller]
fn understood(arguments: &[String]) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = henson(&arguments, &[]);
    let message = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{message}");
    assert!(message.contains("recipe"), "{message}");
}

#[test]
fn launchers_are_recognised_by_what_they_set() {
    let place = TempDir::new().unwrap();
    let out = place.path().join("run").display().to_string();
    let pretrain = ["pretrain", "--data", "absent", "--out", &out, "--set", "steps=1"];
    let with_library = [&pretrain[..], &["--mpi-library", "/nowhere/libmpi.so"]].concat();
    let srun = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_STEP_ID", "0"), ("SLURM_JOB_ID", "7")];
    let said = |arguments: &[&str], variables: &[(&str, &str)]| {
        let ended = henson(arguments, variables);
        assert_eq!(ended.status.code(), Some(1));
        String::from_utf8(ended.stderr).unwrap()
    };
    // One of several: MPI is looked for before anything else.
    assert!(said(&with_library, &srun).contains("/nowhere/libmpi.so"));
    // A batch script without srun, a step of one task, and many runs under one launcher are alone: the data is.
    for variables in [&srun[..2], &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_STEP_ID", "0")]] {
        assert!(said(&with_library, variables).contains("absent"), "{variables:?}");
        assert!(!said(&with_library, variables).contains("libmpi"), "{variables:?}");
    }
    assert!(!said(&[&with_library[..], &["--ranks", "1"]].concat(), &srun).contains("libmpi"));
    let torchrun = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
    assert!(said(&pretrain, &torchrun).contains("started by torchrun with 2 processes"));
    assert!(said(&[&pretrain[..], &["--ranks", "3"]].concat(), &srun).contains("srun has started 2 processes"));
}

#[test]
fn the_job_for_kubernetes_is_well_formed() {
    let job = yaml(&std::fs::read_to_string(file("mpijob.yaml")).unwrap()).unwrap();
    assert_eq!((&job["apiVersion"], &job["kind"]), (&"kubeflow.org/v2beta1".into(), &"MPIJob".into()));
    conventional(&job, "");
    let spec = &job["spec"];
    let replicas = &spec["mpiReplicaSpecs"];
    let names: Vec<&String> = replicas.as_object().unwrap().keys().collect();
    assert_eq!(names, ["Launcher", "Worker"]);
    assert_eq!(replicas["Launcher"]["replicas"], 1);
    let container = |kind: &str| replicas[kind]["template"]["spec"]["containers"][0].clone();
    // As many processes as the workers have room for.
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let mpirun = strings(&container("Launcher")["command"]);
    let room = spec["slotsPerWorker"].as_u64().unwrap() * replicas["Worker"]["replicas"].as_u64().unwrap();
    assert_eq!(mpirun[..3], ["mpirun", "-n", &room.to_string()]);
    let arguments = strings(&container("Launcher")["args"]);
    assert_eq!(arguments[0], "henson");
    assert!(arguments.contains(&format!("accumulation={room}")), "{arguments:?}");
    understood(&arguments[1..]);
    // Every mount is that of a volume.
    let pod = &replicas["Worker"]["template"]["spec"];
    for mount in container("Worker")["volumeMounts"].as_array().unwrap() {
        assert!(pod["volumes"].as_array().unwrap().iter().any(|volume| volume["name"] == mount["name"]), "{mount}");
    }
}

#[test]
fn the_job_set_is_well_formed() {
    let job = yaml(&std::fs::read_to_string(file("jobset.yaml")).unwrap()).unwrap();
    assert_eq!((&job["apiVersion"], &job["kind"]), (&"jobset.x-k8s.io/v1alpha2".into(), &"JobSet".into()));
    conventional(&job, "");
    let (name, replicated) = (job["metadata"]["name"].as_str().unwrap(), &job["spec"]["replicatedJobs"][0]);
    let spec = &replicated["template"]["spec"];
    // One pod for each machine, each with its number.
    assert_eq!((&spec["completionMode"], &spec["parallelism"]), (&"Indexed".into(), &spec["completions"]));
    let pod = &spec["template"]["spec"];
    let container = &pod["containers"][0];
    let all = [&container["command"], &container["args"]].map(|list| list.as_array().unwrap().clone()).concat();
    let all: Vec<String> = all.iter().map(|text| text.as_str().unwrap().to_owned()).collect();
    assert_eq!(all[0], "henson");
    let mut rest = all[1..].to_vec();
    let mut take = |flag: &str| {
        let place = rest.iter().position(|argument| argument == flag).unwrap_or_else(|| panic!("no {flag}"));
        rest.drain(place..place + 2).nth(1).unwrap()
    };
    let [ranks, nodes, node, address] = ["--ranks", "--nodes", "--node", "--address"].map(&mut take);
    assert_eq!(node, "$(JOB_COMPLETION_INDEX)");
    assert_eq!(nodes, spec["parallelism"].to_string());
    assert_eq!(ranks, container["resources"]["limits"]["nvidia.com/gpu"].to_string());
    let parts = ranks.parse::<usize>().unwrap() * nodes.parse::<usize>().unwrap();
    assert!(rest.contains(&format!("accumulation={parts}")), "{rest:?}");
    // As JobSet calls its pods: the set, the job, its number, the pod's; then the set's service.
    let subdomain = job["spec"]["network"]["subdomain"].as_str().unwrap();
    let host = format!("{name}-{}-0-0.{subdomain}:", replicated["name"].as_str().unwrap());
    assert!(address.starts_with(&host) && address[host.len()..].parse::<u16>().is_ok(), "{address}");
    understood(&rest);
    // The program knows the other flags, too: it says what is wrong with them.
    let wrong = ["--ranks", &*ranks, "--nodes", &*nodes, "--node", &*nodes, "--address", &*address];
    let arguments: Vec<&str> = rest.iter().map(String::as_str).chain(wrong).collect();
    let ended = henson(&arguments, &[]);
    let message = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{message}");
    assert!(message.contains("they are counted from 0"), "{message}");
    for mount in container["volumeMounts"].as_array().unwrap() {
        assert!(pod["volumes"].as_array().unwrap().iter().any(|volume| volume["name"] == mount["name"]), "{mount}");
    }
}

/// Keys are lowerCamelCase but for the kinds of replicas, names are DNS labels, quantities are numbers with a unit.
fn conventional(value: &Value, path: &str) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let kinds = path.ends_with("mpiReplicaSpecs");
                let first = if kinds { char::is_uppercase } else { char::is_lowercase };
                let camel = key.starts_with(first) && key.chars().all(|c| c.is_ascii_alphanumeric());
                // Kinds of devices are named like domains.
                let device = path.ends_with("limits") && key.contains('/');
                assert!(camel || device, "{path}.{key}: not a key as Kubernetes has them");
                if key == "name" || key == "claimName" {
                    let name = value.as_str().unwrap();
                    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
                    assert!(
                        name.chars().all(fits) && name.len() < 64 && !name.starts_with('-'),
                        "{path}.{key}: {name}"
                    );
                }
                if path.ends_with("limits") {
                    // A number, or one with a unit as text.
                    let amount = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                    let number = amount.trim_end_matches(['G', 'M', 'i', 'm']);
                    assert!(number.parse::<u64>().is_ok(), "{path}.{key}: {value}");
                }
                conventional(value, &format!("{path}.{key}"));
            }
        }
        Value::Array(items) => items.iter().for_each(|item| conventional(item, path)),
        _ => {}
    }
}

/// Reads the YAML that these files keep to: block mappings and lists, one-line `[…]` and `{…}`, plain and double-quoted scalars, comments on
/// lines of their own. All else is an error, as are tabs, keys that are there twice, and indentation that fits nothing.
fn yaml(text: &str) -> Result<Value, String> {
    let lines: Vec<(usize, usize, &str)> = text
        .lines()
        .enumerate()
        .map(|(number, line)| (number + 1, line.len() - line.trim_start().len(), line.trim()))
        .filter(|(_, _, line)| !line.is_empty() && !line.starts_with('#'))
        .collect();
    if text.contains('\t') {
        return Err("a tab".to_owned());
    }
    if let Some((number, ..)) = lines.iter().find(|(.., line)| line.contains(" #")) {
        return Err(format!("line {number}: a comment behind a value"));
    }
    let mut rest = &lines[..];
    let indent = rest.first().map_or(0, |line| line.1);
    let value = block(&mut rest, indent)?;
    match rest.first() {
        Some((number, ..)) => Err(format!("line {number}: its indentation fits nothing above")),
        None => Ok(value),
    }
}

type Lines<'a, 'b> = &'b mut &'a [(usize, usize, &'a str)];

fn block(rest: Lines<'_, '_>, indent: usize) -> Result<Value, String> {
    let is_list = rest.first().is_some_and(|(.., line)| line.starts_with("- "));
    let (mut items, mut fields) = (Vec::new(), Map::new());
    while let Some(&(number, own, line)) = rest.first().filter(|line| line.1 == indent) {
        if line.starts_with("- ") != is_list {
            break;
        }
        if let Some(item) = line.strip_prefix("- ") {
            // What follows the dash is the first line of a block of its own, or one value.
            if item.starts_with(['{', '[', '"']) || !item.contains(": ") && !item.ends_with(':') {
                *rest = &rest[1..];
                items.push(scalar(item, number)?);
                continue;
            }
            let inner = own + 2;
            let count = rest.iter().skip(1).take_while(|line| line.1 >= inner).count();
            let mut lines = vec![(number, inner, item)];
            lines.extend_from_slice(&rest[1..=count]);
            *rest = &rest[count + 1..];
            let mut slice = &lines[..];
            items.push(block(&mut slice, inner)?);
            if let Some((number, ..)) = slice.first() {
                return Err(format!("line {number}: its indentation fits nothing above"));
            }
            continue;
        }
        let (key, value) = line.split_once(':').ok_or(format!("line {number}: no key"))?;
        *rest = &rest[1..];
        let value = match (value.trim(), rest.first()) {
            ("", Some(next)) if next.1 > indent => {
                let inner = next.1;
                block(rest, inner)?
            }
            ("", _) => Value::Null,
            (value, _) if line[key.len() + 1..].starts_with(' ') => scalar(value, number)?,
            _ => return Err(format!("line {number}: no space after the colon")),
        };
        if fields.insert(key.to_owned(), value).is_some() {
            return Err(format!("line {number}: `{key}` is there twice"));
        }
    }
    Ok(if is_list { Value::Array(items) } else { Value::Object(fields) })
}

fn scalar(text: &str, number: usize) -> Result<Value, String> {
    let wrong = || format!("line {number}: cannot read `{text}`");
    let within = |open, close| text.strip_prefix(open).and_then(|text: &str| text.strip_suffix(close));
    if let Some(items) = within('[', ']') {
        return items.split(", ").map(|item| scalar(item, number)).collect();
    }
    if let Some(fields) = within('{', '}') {
        let field = |field: &str| {
            let (key, value) = field.trim().split_once(": ").ok_or_else(wrong)?;
            Ok((key.to_owned(), scalar(value, number)?))
        };
        return fields.split(", ").map(field).collect::<Result<Map<_, _>, _>>().map(Value::Object);
    }
    if text.starts_with('"') {
        return serde_json::from_str(text).map_err(|_| wrong());
    }
    if text.contains(['"', '[', ']', '{', '}', '&', '*', '|', '>', '\'']) || text.contains(": ") {
        return Err(wrong());
    }
    Ok(text.parse::<u64>().map_or_else(|_| Value::from(text), Value::from))
}

#[test]
fn the_reader_of_yaml_refuses_what_is_broken() {
    let read = |text: &str| yaml(text);
    let good = "a: 1\nb:\n  - c: x\n    d: [\"e\", \"f\"]\n  - { g: 2 }\n# h\ni: \"3\"\n";
    let expected = serde_json::json!({"a": 1, "b": [{"c": "x", "d": ["e", "f"]}, {"g": 2}], "i": "3"});
    assert_eq!(read(good).unwrap(), expected);
    for broken in
        ["a: 1\n  b: 2\n", "a: 1\na: 2\n", "a:1\n", "a: [1\n", "\ta: 1\n", "a:\n    - b: 1\n  c: 2\n", "a: \"x\n"]
    {
        assert!(read(broken).is_err(), "{broken:?}: {:?}", read(broken));
    }
}
