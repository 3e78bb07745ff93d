//! Hard negatives: of the texts that are near to a query by some encoder, those that are not its own.

use henson_kernels::philox::Stream;

use crate::nearest::Near;

/// Numbers the stream of draws among all uses of a seed.
const MINING: u32 = 0x319e;

/// Which of the near texts become negatives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MiningSettings {
    /// How many of the nearest are skipped: they may be right without anybody having said so.
    pub skip: usize,
    /// Among how many of the nearest they are looked for.
    pub among: usize,
    /// How many are taken.
    pub count: usize,
    /// They must be this much less near than the query's own text.
    pub margin: Option<f64>,
    /// They must be less near than this share of the own text's nearness, such as 0.95.
    pub relative: Option<f64>,
    /// They must not be nearer than this.
    pub most: Option<f64>,
    /// Nor further away than this.
    pub least: Option<f64>,
    /// With a seed, any of those that are left; else the nearest of them.
    pub random: Option<u64>,
}

/// The negatives of query number `query`. `near` are the nearest texts, best first; `is_own` tells those that are right; `own` is how
/// near the query's own text is.
pub fn mine(
    query: u64,
    near: &[Near],
    own: f64,
    is_own: impl Fn(usize) -> bool,
    settings: &MiningSettings,
) -> Vec<Near> {
    let others = near.iter().filter(|near| !is_own(near.index)).take(settings.among).skip(settings.skip);
    let may = |near: &&Near| {
        let score = f64::from(near.score);
        settings.margin.is_none_or(|margin| score <= own - margin)
            && settings.relative.is_none_or(|share| score <= own * share)
            && settings.most.is_none_or(|most| score <= most)
            && settings.least.is_none_or(|least| score >= least)
    };
    let mut found: Vec<Near> = others.filter(may).copied().collect();
    if let Some(seed) = settings.random {
        let mut draws = Stream::new(seed, MINING, query);
        for i in 0..found.len().min(settings.count) {
            let other = i + draws.below((found.len() - i) as u32) as usize;
            found.swap(i, other);
        }
        found.truncate(settings.count);
        found.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.index.cmp(&b.index)));
    }
    found.truncate(settings.count);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negatives_are_near_and_not_right() {
        let near: Vec<Near> = (0..10).map(|i| Near { index: i, score: 0.9 - 0.1 * i as f32 }).collect();
        let plain = MiningSettings {
            skip: 0,
            among: 10,
            count: 3,
            margin: None,
            relative: None,
            most: None,
            least: None,
            random: None,
        };
        let of = |settings: &MiningSettings| -> Vec<usize> {
            mine(0, &near, 0.8, |i| i == 1, settings).iter().map(|near| near.index).collect()
        };
        assert_eq!(of(&plain), [0, 2, 3]);
        assert_eq!(of(&MiningSettings { skip: 2, ..plain }), [3, 4, 5]);
        assert_eq!(of(&MiningSettings { among: 2, ..plain }), [0, 2]);
        assert_eq!(of(&MiningSettings { margin: Some(0.15), ..plain }), [3, 4, 5]);
        assert_eq!(of(&MiningSettings { relative: Some(0.7), ..plain }), [4, 5, 6]);
        assert_eq!(of(&MiningSettings { most: Some(0.55), least: Some(0.35), ..plain }), [4, 5]);
        let random = MiningSettings { random: Some(3), ..plain };
        assert_eq!(of(&random), of(&random));
        let mut drawn = [0; 10];
        for query in 0..900 {
            let found = mine(query, &near, 0.8, |i| i == 1, &random);
            assert!(found.len() == 3 && found.windows(2).all(|two| two[0].score > two[1].score));
            found.iter().for_each(|near| drawn[near.index] += 1);
        }
        // A third of 900 each.
        assert!(drawn[1] == 0 && drawn.iter().enumerate().all(|(i, n)| i == 1 || (230..370).contains(n)), "{drawn:?}");
    }
}
