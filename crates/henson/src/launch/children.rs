//! The processes that this one starts on its machine, one for each GPU, and how they end.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use henson_ranks::{Meet, OWN};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use super::{LOST, Started};
use crate::{output, signals};

/// How long the others may take to end after the first, besides the time after which a rank counts as lost.
const LAST_WORDS: Duration = Duration::from_secs(30);

/// Starts `count` processes with this command as those of machine number `node` of `nodes`, waits for them, and ends as they did. Returns
/// only where they cannot be started.
pub(super) fn run(
    count: usize,
    (node, nodes): (usize, usize),
    meet: Option<&Meet>,
    lost_after: u64,
) -> anyhow::Result<Started> {
    let stop = signals::stop()?;
    let program = std::env::current_exe().context("cannot find the file of this program")?;
    let place = std::env::temp_dir().join(format!("henson-ranks-{}", std::process::id()));
    let meet = match meet {
        Some(Meet::Address(host, port, _)) => format!("{host}:{port}"),
        Some(Meet::File(path)) => path.display().to_string(),
        None => {
            std::fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
            place.join("meet").display().to_string()
        }
    };
    let mut children: Vec<Child> = Vec::new();
    for local in 0..count {
        let numbers = [node * count + local, nodes * count, local].map(|number| number.to_string());
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).envs(OWN[..3].iter().zip(numbers)).env(OWN[3], &meet);
        // A terminal's ctrl-C would reach them twice otherwise: from it, and from this process.
        command.process_group(0);
        match command.spawn() {
            Ok(child) => children.push(child),
            Err(error) => {
                end(&children, Signal::KILL);
                return Err(error).context("cannot start this program again");
            }
        }
    }
    let (mut ended, mut first, mut told): (Vec<ExitStatus>, Option<Instant>, bool) = (Vec::new(), None, false);
    while !children.is_empty() {
        let mut running = Vec::new();
        for mut child in children {
            match child.try_wait() {
                Ok(Some(status)) => {
                    ended.push(status);
                    if !status.success() {
                        first.get_or_insert_with(Instant::now);
                    }
                }
                // Where it cannot be asked, it is as good as running.
                _ => running.push(child),
            }
        }
        children = running;
        if stop.load(Ordering::Relaxed) && !told {
            told = true;
            end(&children, Signal::TERM);
        }
        if first.is_some_and(|first| first.elapsed() > LAST_WORDS + Duration::from_secs(lost_after)) {
            end(&children, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // It was ours alone.
    let _ = std::fs::remove_dir_all(&place);
    for status in ended.iter().filter_map(ExitStatus::signal) {
        output::message(&format!("a process was ended by signal {status}"));
    }
    std::process::exit(code(&ended))
}

/// How all ended together: by the error of one, which the others only heard of; interrupted; by a loss; or well.
fn code(ended: &[ExitStatus]) -> i32 {
    // What a signal ended is lost to the others.
    let codes: Vec<i32> = ended.iter().map(|status| status.code().unwrap_or(LOST)).collect();
    let one = codes.iter().copied().find(|code| ![0, LOST].contains(code));
    one.unwrap_or_else(|| codes.into_iter().find(|code| *code != 0).unwrap_or(0))
}

fn end(children: &[Child], signal: Signal) {
    for pid in children.iter().filter_map(|child| Pid::from_raw(child.id() as i32)) {
        // One that has just ended needs no signal.
        let _ = kill_process(pid, signal);
    }
}

/// For one of the processes: it ends where the one that started it is killed.
pub(super) fn end_with_parent() {
    // Where that cannot be had, somebody else must end them.
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_one_counts() {
        let all = |raw: &[i32]| code(&raw.iter().map(|raw| ExitStatus::from_raw(*raw)).collect::<Vec<_>>());
        let exit = |code: i32| code << 8;
        assert_eq!(all(&[0, 0]), 0);
        assert_eq!(all(&[exit(75), exit(1), exit(75)]), 1);
        assert_eq!(all(&[exit(130), exit(130)]), 130);
        // Killed.
        assert_eq!(all(&[exit(75), 9]), 75);
    }
}
