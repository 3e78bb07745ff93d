//! How long a step would take on more ranks, by rates that were measured or are assumed. A model and no measurement: nothing overlaps, every
//! rank is as fast as every other, and making batches, evaluations and checkpoints cost nothing.
//!
//! N parameters, B sequences of S tokens in P parts, R ranks, G of them on a node.

/// How gradients get to their shards, and weights back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Levels {
    /// All ranks with all others.
    One,
    /// First within a node, then between ranks of the same number on all nodes: of every byte that leaves a node there is one copy.
    Two,
}

/// Rates of a machine, in seconds and bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// Forward and backward of one part on one rank: tokens, and seconds; ascending, at least one.
    pub passes: Vec<(f64, f64)>,
    /// The optimizer, for a parameter.
    pub update: f64,
    /// Adding a number to another.
    pub add: f64,
    /// Bytes a second that a rank sends, and receives at the same time, to others on its node.
    pub inside: f64,
    /// The same to other nodes.
    pub between: f64,
    /// What a message costs however short it is.
    pub latency: f64,
    /// What another rank adds to the small values that go around in every step.
    pub values: f64,
    /// Ranks of a node.
    pub per_node: usize,
    /// How bytes are exchanged.
    pub levels: Levels,
}

/// The work of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Parameters of the model.
    pub parameters: usize,
    /// Tokens of the batch.
    pub tokens: usize,
    /// Parts of the batch.
    pub parts: usize,
    /// Bytes of a weight as it is gathered; gradients have 4.
    pub weight_bytes: usize,
}

/// The seconds of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// Forward and backward.
    pub passes: f64,
    /// Adding gradients: of parts, and of ranks.
    pub adding: f64,
    /// Moving gradients, weights and small values.
    pub exchange: f64,
    /// The optimizer.
    pub update: f64,
}

impl Times {
    /// All of it.
    pub fn step(&self) -> f64 {
        self.passes + self.adding + self.exchange + self.update
    }
}

/// What a rank sends in a step, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sent {
    /// To others of its node.
    pub inside: f64,
    /// To other nodes.
    pub between: f64,
}

impl Rates {
    /// How long a step takes that so many ranks share.
    pub fn times(&self, work: Work, ranks: usize) -> Times {
        let (n, r) = (work.parameters as f64, ranks as f64);
        let own = (work.parts / ranks).max(1) as f64;
        let Sent { inside, between } = self.sent(work, ranks);
        let messages = 2.0 * self.messages(ranks);
        Times {
            passes: own * self.pass(work.tokens as f64 / work.parts as f64),
            adding: self.add * n * (own - 1.0 + (r - 1.0) / r),
            exchange: inside / self.inside + between / self.between + messages * self.latency + self.values * (r - 1.0),
            update: self.update * n / r,
        }
    }

    /// The bytes that a rank sends in a step: gradients out, weights back.
    pub fn sent(&self, work: Work, ranks: usize) -> Sent {
        let all = ((4 + work.weight_bytes) * work.parameters) as f64;
        let (on_node, nodes, levels) = self.layout(ranks);
        let (g, n, r) = (on_node as f64, nodes as f64, ranks as f64);
        match levels {
            Levels::One => Sent { inside: all * (g - 1.0) / r, between: all * (r - g) / r },
            Levels::Two => Sent { inside: all * (g - 1.0) / g, between: all / g * (n - 1.0) / n },
        }
    }

    /// Others that a rank exchanges with.
    fn messages(&self, ranks: usize) -> f64 {
        let (on_node, nodes, levels) = self.layout(ranks);
        match levels {
            Levels::One => (ranks - 1) as f64,
            Levels::Two => (on_node - 1 + nodes - 1) as f64,
        }
    }

    /// Ranks on a node, nodes, and how they exchange: two levels need whole nodes.
    fn layout(&self, ranks: usize) -> (usize, usize, Levels) {
        let on_node = self.per_node.min(ranks);
        let levels = if ranks.is_multiple_of(on_node) { self.levels } else { Levels::One };
        (on_node, ranks.div_ceil(on_node), levels)
    }

    /// How long so many tokens take: by the measured sizes around them, in proportion beyond the smallest and the largest.
    fn pass(&self, tokens: f64) -> f64 {
        let after = self.passes.partition_point(|(size, _)| *size < tokens);
        match (after.checked_sub(1).map(|i| self.passes[i]), self.passes.get(after)) {
            (Some((less, fast)), Some((more, slow))) => fast + (slow - fast) * (tokens - less) / (more - less),
            (Some((size, seconds)), None) => seconds * tokens / size,
            (None, Some((size, seconds))) => seconds * tokens / size,
            (None, None) => f64::NAN,
        }
    }
}

/// Numbers of ranks in order, each with the seconds of its run: the last that it pays to go to, if one is behind it. From one number to the
/// next, less than half of what is added then turns into speed.
pub fn pays_up_to(rows: &[(usize, f64)]) -> Option<usize> {
    rows.windows(2).find_map(|pair| {
        let [(ranks, seconds), (more, shorter)] = [pair[0], pair[1]];
        let gained = (seconds / shorter - 1.0) / (more as f64 / ranks as f64 - 1.0);
        (gained < 0.5).then_some(ranks)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Round numbers, to be followed by hand.
    fn rates(levels: Levels) -> Rates {
        Rates {
            passes: vec![(1000.0, 1.0), (3000.0, 2.0)],
            update: 1e-9,
            add: 2e-9,
            inside: 8e9,
            between: 1e9,
            latency: 1e-6,
            values: 1e-5,
            per_node: 4,
            levels,
        }
    }

    const WORK: Work = Work { parameters: 1_000_000_000, tokens: 16_000, parts: 16, weight_bytes: 4 };

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9 * expected.abs().max(1.0), "{found}, expected {expected}");
    }

    #[test]
    fn one_rank_exchanges_nothing() {
        let times = rates(Levels::One).times(WORK, 1);
        // 16 parts of 1,000 tokens, 15 additions of 10⁹ numbers, an update of as many.
        assert_eq!((times.passes, times.exchange), (16.0, 0.0));
        near(times.adding, 30.0);
        near(times.update, 1.0);
        near(times.step(), 47.0);
    }

    #[test]
    fn all_with_all() {
        let rates = rates(Levels::One);
        // Four on a node: 8 GB × 3/4 at 8 GB/s, six messages, three others' small values.
        let times = rates.times(WORK, 4);
        near(times.exchange, 0.75 + 6e-6 + 3e-5);
        // Four parts each, so three additions and 3/4 of one; a quarter of the update.
        near(times.adding, 2.0 * 3.75);
        near(times.update, 0.25);
        assert_eq!(times.passes, 4.0);
        // On four nodes, of 8 GB 3/16 stay on the node, and 12/16 leave it.
        assert_eq!(rates.sent(WORK, 16), Sent { inside: 1.5e9, between: 6e9 });
        near(rates.times(WORK, 16).exchange, 1.5 / 8.0 + 6.0 + 30e-6 + 15e-5);
        // Weights of two bytes.
        let half = Work { weight_bytes: 2, ..WORK };
        assert_eq!(rates.sent(half, 16), Sent { inside: 1.125e9, between: 4.5e9 });
    }

    #[test]
    fn two_levels_send_less_between_nodes() {
        let rates = rates(Levels::Two);
        // 3/4 of 8 GB within a node; of a quarter of it 3/4 to the three other nodes.
        assert_eq!(rates.sent(WORK, 16), Sent { inside: 6e9, between: 1.5e9 });
        near(rates.times(WORK, 16).exchange, 0.75 + 1.5 + 12e-6 + 15e-5);
        // Nodes that are not full have one level.
        let six = rates.sent(WORK, 6);
        near(six.inside, 4e9);
        near(six.between, 8e9 / 3.0);
    }

    /// The table of the design: 350 GB/s inside of a node of 8, 42 GB/s for each between them, bf16 weights.
    #[test]
    fn the_design_s_table_comes_out() {
        let rates = Rates { inside: 350e9, between: 42e9, per_node: 8, add: 0.0, values: 0.0, ..rates(Levels::Two) };
        let ms = |parameters, ranks| {
            let work = Work { parameters, weight_bytes: 2, ..WORK };
            1e3 * rates.times(work, ranks).exchange
        };
        for (ranks, base, large) in
            [(8, 1.7, 5.1), (16, 2.7, 8.1), (64, 3.4, 10.4), (256, 3.7, 11.0), (1024, 3.9, 11.3)]
        {
            let found = [ms(110_106_428, ranks), ms(336_226_108, ranks)];
            assert!((found[0] - base).abs() < 0.1 && (found[1] - large).abs() < 0.1, "{ranks} ranks: {found:?}");
        }
    }

    #[test]
    fn passes_are_taken_from_the_sizes_around() {
        let rates = rates(Levels::One);
        for (tokens, seconds) in [(1000.0, 1.0), (2000.0, 1.5), (3000.0, 2.0), (500.0, 0.5), (6000.0, 4.0)] {
            near(rates.pass(tokens), seconds);
        }
    }

    #[test]
    fn it_pays_while_half_of_what_is_added_counts() {
        // From 2 to 4 ranks 4 s become 2.5: 60% of two more. From 4 to 8, 2.5 become 1.8: 39% of four more.
        let rows = [(1, 7.5), (2, 4.0), (4, 2.5), (8, 1.8), (16, 1.0)];
        assert_eq!(pays_up_to(&rows), Some(4));
        assert_eq!(pays_up_to(&rows[..3]), None);
        assert_eq!(pays_up_to(&rows[3..]), None);
    }
}
