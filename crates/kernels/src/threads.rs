//! Parts of some work on several threads, for work that is too long or too rare for the pool of [`crate::cpu`].

use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

/// Works on each part, on at most so many threads, this one included; the results come in the order of the parts. Where the
/// system gives fewer threads, the results are the same, only later. A panic reaches the caller.
pub fn in_threads<P, I, R>(threads: usize, parts: I, work: impl Fn(P) -> R + Sync) -> Vec<R>
where
    I: IntoIterator<Item = P>,
    I::IntoIter: ExactSizeIterator + Send,
    R: Send,
{
    let parts = parts.into_iter();
    let threads = threads.min(parts.len());
    if threads <= 1 {
        return parts.map(work).collect();
    }
    let queue = Mutex::new(parts.enumerate());
    let drain = || {
        let mut done = Vec::new();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((number, part)) = next else { return done };
            done.push((number, work(part)));
        }
    };
    let mut done = std::thread::scope(|scope| {
        let start = |_| Builder::new().name("henson-part".to_owned()).spawn_scoped(scope, drain).ok();
        let others: Vec<_> = (1..threads).filter_map(start).collect();
        let mut done = drain();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Does two things, side by side where a thread can be started.
pub fn both<A, B: Send>(a: impl FnOnce() -> A, b: impl FnOnce() -> B + Send) -> (A, B) {
    // Whoever comes first takes it: the other thread, or this one where there is no other.
    let b = Mutex::new(Some(b));
    let take = || b.lock().unwrap_or_else(PoisonError::into_inner).take();
    std::thread::scope(|scope| {
        let other = Builder::new().name("henson-half".to_owned()).spawn_scoped(scope, || take().map(|b| b())).ok();
        let own = a();
        let done = other.and_then(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        match done.or_else(|| take().map(|b| b())) {
            Some(done) => (own, done),
            None => unreachable!("one of the two threads took it"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order() {
        for threads in [0, 1, 2, 5, 100] {
            for parts in [0, 1, 2, 7, 50] {
                let expected: Vec<usize> = (0..parts).map(|i| i * i).collect();
                assert_eq!(in_threads(threads, 0..parts, |i| i * i), expected);
            }
        }
        let mut values = [1, 2, 3, 4, 5];
        in_threads(2, values.chunks_mut(2), |chunk| chunk.iter_mut().for_each(|x| *x *= 10));
        assert_eq!(values, [10, 20, 30, 40, 50]);
        assert_eq!(both(|| 1, || "two"), (1, "two"));
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let panics = |work: &(dyn Fn() + std::panic::RefUnwindSafe)| std::panic::catch_unwind(work).is_err();
        assert!(panics(&|| drop(in_threads(2, 0..9, |i| assert!(i != 5)))));
        assert!(panics(&|| assert_eq!(both(|| 1, || panic!("b")), (1, ()))));
    }
}
