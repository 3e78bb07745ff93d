//! Whose turn it is where one thread at a time may do something, in the order in which threads ask: one that asks again and again
//! does not keep out others.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::ThreadId;

#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Whose turn it is, and how many that thread holds.
    whose: Option<(ThreadId, usize)>,
    /// Threads that have asked for one, and those that got it.
    asked: u64,
    served: u64,
}

/// The right to use a GPU, as long as it is alive. A thread that has it gets it again at once.
pub struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits until no other thread has a turn.
    pub(crate) fn take(&self) -> Turn<'_> {
        let me = std::thread::current().id();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((thread, held)) = &mut state.whose
            && *thread == me
        {
            *held += 1;
            return Turn(self);
        }
        let ticket = state.asked;
        state.asked += 1;
        while state.whose.is_some() || state.served != ticket {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.served += 1;
        state.whose = Some((me, 1));
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, held)) = &mut state.whose {
            *held -= 1;
            if *held == 0 {
                state.whose = None;
                self.0.changed.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(turns: &Turns) -> u64 {
        turns.state.lock().unwrap().asked
    }

    #[test]
    fn turns_come_in_the_order_of_asking() {
        let (turns, order) = (Turns::default(), Mutex::new(vec![]));
        std::thread::scope(|scope| {
            let first = turns.take();
            for i in 0..4 {
                scope.spawn({
                    let (turns, order) = (&turns, &order);
                    move || {
                        let _turn = turns.take();
                        order.lock().unwrap().push(i);
                    }
                });
                while asked(&turns) < i + 2 {
                    std::thread::yield_now();
                }
            }
            // One of its own needs no waiting; asked for once it has none, it comes behind the others.
            drop(turns.take());
            assert!(order.lock().unwrap().is_empty());
            drop(first);
            let _again = turns.take();
            order.lock().unwrap().push(4);
        });
        assert_eq!(order.into_inner().unwrap(), [0, 1, 2, 3, 4]);
    }
}
