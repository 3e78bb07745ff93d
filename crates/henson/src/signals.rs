//! Interruptions: ctrl-C, a polite end by whoever manages processes, or a terminal that is gone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::output;

/// How long an interruption may take before a word is said about it.
const SOON: Duration = Duration::from_secs(1);

/// The flag of the process: a command of several runs must not lose a signal that comes between two of them.
static STOP: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);

/// Set by the first interruption, for work that ends with everything saved. The second one ends the program at once, unless
/// it is a hangup: those come in pairs, from the terminal and from the shell.
pub(crate) fn stop() -> anyhow::Result<Arc<AtomicBool>> {
    let mut known = STOP.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(stop) = &*known {
        return Ok(Arc::clone(stop));
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))?;
    }
    for signal in heeded() {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let mut signals = Signals::new(heeded())?;
    let report = move || {
        if signals.forever().next().is_some() {
            std::thread::sleep(SOON);
            output::message("interrupted: finishing the current work; a second signal stops at once");
        }
    };
    // Where no thread can be started, an interruption works without a word.
    drop(std::thread::Builder::new().name("henson-signals".to_owned()).spawn(report));
    Ok(Arc::clone(known.insert(stop)))
}

/// From here on, the first interruption ends the program: for work that looks at no flag, after some that did. Says whether one
/// came before, after that work had looked for the last time.
pub(crate) fn end_at_once() -> anyhow::Result<bool> {
    for signal in heeded() {
        signal_hook::flag::register_conditional_default(signal, Arc::new(AtomicBool::new(true)))?;
    }
    let known = STOP.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(known.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)))
}

/// The signals that interrupt. A hangup that was ignored when henson started (`nohup`) stays ignored; where that cannot be
/// known, it does what it did.
fn heeded() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").ok();
    let ignored = status.and_then(|status| {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    let mut signals = vec![SIGINT, SIGTERM];
    if ignored.is_some_and(|mask| mask & (1 << (SIGHUP - 1)) == 0) {
        signals.push(SIGHUP);
    }
    signals
}
