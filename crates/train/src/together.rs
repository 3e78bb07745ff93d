//! Several ranks at one training: which parts of a batch are whose, and what they tell each other. With one process all of it is nothing.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use henson_ranks::Ranks;
use henson_tensor::Reading;

use crate::error::{Result, TrainError};

/// Checks that so many ranks can share a batch of so many parts: each takes a whole branch of the tree in which parts are added.
pub fn check_parts(parts: usize, ranks: usize) -> Result<()> {
    let fits = |ranks: usize| parts.is_multiple_of(ranks) && (parts / ranks).is_power_of_two();
    if fits(ranks) {
        return Ok(());
    }
    let allowed: Vec<String> = (1..=parts).filter(|ranks| fits(*ranks)).map(|ranks| ranks.to_string()).collect();
    let expected = format!(
        "a number that {ranks} ranks divide by a power of two (parts of a batch are added in a tree, and each rank takes a branch): \
         {parts} parts can be shared by {} ranks; or set accumulation={ranks}, or {}",
        allowed.join(", "),
        2 * ranks
    );
    Err(TrainError::setting("accumulation", parts, expected))
}

/// The parts of a batch that a rank takes: neighbours.
pub(crate) fn own_parts(ranks: Option<&Ranks>, parts: usize) -> std::ops::Range<usize> {
    ranks.map_or(0..parts, |ranks| ranks.share(parts, ranks.rank()))
}

/// The numbers of all ranks, in their order: each is a list of readings. `flag` is whether any rank has raised it.
pub(crate) fn share_readings(ranks: &Ranks, readings: Vec<Reading>, flag: bool) -> Result<(Vec<Reading>, bool)> {
    let mut own = vec![u8::from(flag)];
    for reading in readings {
        let numbers = reading.wait()?;
        own.push(numbers.len() as u8);
        own.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    }
    let (mut all, mut any) = (Vec::new(), false);
    for value in ranks.gather(&own) {
        let (flag, mut rest) = value.split_first().ok_or_else(nonsense)?;
        any |= *flag != 0;
        while let Some((count, behind)) = rest.split_first() {
            let (numbers, behind) = behind.split_at_checked(8 * usize::from(*count)).ok_or_else(nonsense)?;
            let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap_or_default());
            all.push(Reading::known(&numbers.chunks_exact(8).map(number).collect::<Vec<_>>())?);
            rest = behind;
        }
    }
    Ok((all, any))
}

/// Whether a flag is raised on any rank.
pub(crate) fn any(ranks: Option<&Arc<Ranks>>, flag: bool) -> bool {
    match ranks {
        None => flag,
        Some(ranks) => ranks.gather(&[u8::from(flag)]).iter().any(|flag| flag.first() == Some(&1)),
    }
}

/// What rank 0 knows, as JSON, for all.
pub(crate) fn from_first<T: serde::Serialize + serde::de::DeserializeOwned>(
    ranks: Option<&Arc<Ranks>>,
    value: T,
) -> Result<T> {
    let Some(ranks) = ranks else { return Ok(value) };
    let bytes = if ranks.rank() == 0 { serde_json::to_vec(&value).map_err(|_| nonsense())? } else { Vec::new() };
    let shared = ranks.from_first(&bytes);
    if ranks.rank() == 0 { Ok(value) } else { serde_json::from_slice(&shared).map_err(|_| nonsense()) }
}

/// Compares what must be the same on all ranks, the version among it.
pub fn agree(ranks: &Ranks, facts: &[(&str, String)]) -> Result<()> {
    let mut all = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    all.extend(facts.iter().cloned());
    ranks.agree(&all, &henson_ranks::host()).map_err(|error| TrainError::Ranks(error.to_string()))
}

/// A short name for something that is compared between ranks of one version.
pub fn digest(value: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

fn nonsense() -> TrainError {
    TrainError::Ranks("a message between ranks makes no sense: are all of the same version?".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_whole_branches() {
        for (parts, ranks) in [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3), (12, 3), (8, 1), (14, 7)] {
            check_parts(parts, ranks).unwrap();
        }
        for (parts, ranks, hint) in
            [(6, 1, "3, 6 ranks"), (4, 3, "1, 2, 4 ranks"), (1, 2, "accumulation=2"), (12, 2, "3, 6, 12")]
        {
            let error = check_parts(parts, ranks).unwrap_err().to_string();
            assert!(error.contains(hint), "{parts} {ranks}: {error}");
        }
    }

    #[test]
    fn readings_come_in_the_order_of_ranks() {
        let world = Ranks::in_threads(3);
        std::thread::scope(|scope| {
            for ranks in &world {
                scope.spawn(move || {
                    let rank = ranks.rank() as f64;
                    let own = vec![Reading::known(&[rank, -rank]).unwrap(), Reading::known(&[10.0 * rank]).unwrap()];
                    let (all, any) = share_readings(ranks, own, rank == 1.0).unwrap();
                    let all: Vec<Vec<f64>> = all.into_iter().map(|reading| reading.wait().unwrap()).collect();
                    assert_eq!(
                        all,
                        [vec![0.0, -0.0], vec![0.0], vec![1.0, -1.0], vec![10.0], vec![2.0, -2.0], vec![20.0]]
                    );
                    assert!(any);
                });
            }
        });
    }
}
