//! Interruptions: ctrl-C, or a polite end by whoever manages processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How long an interruption may take before a word is said about it.
const SOON: Duration = Duration::from_secs(1);

/// The flag of the process: a command of several runs must not lose a signal that comes between two of them.
static STOP: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);

/// Set by the first interruption, for work that ends with everything saved. The second one ends the program at once.
pub(crate) fn stop() -> anyhow::Result<Arc<AtomicBool>> {
    let mut known = STOP.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(stop) = &*known {
        return Ok(Arc::clone(stop));
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            std::thread::sleep(SOON);
            eprintln!("interrupted: what is under way is finished first; a second signal ends it at once");
        }
    });
    Ok(Arc::clone(known.insert(stop)))
}

/// From here on, the first interruption ends the program: for work that looks at no flag, after some that did. Says whether one
/// came before, after that work had looked for the last time.
pub(crate) fn end_at_once() -> anyhow::Result<bool> {
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, Arc::new(AtomicBool::new(true)))?;
    }
    let known = STOP.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(known.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)))
}
