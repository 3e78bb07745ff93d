//! Sequences in the order of the text, for networks that remember what they read before (Dai et al. 2019, Yang et al. 2019).
//!
//! All documents in a row are cut into blocks, and these are divided into B rows of equal length; a step has the next block of each. So
//! sequence i of a step stands behind sequence i of the step before. What is drawn for a block differs from epoch to epoch, where it
//! stands does not.
//!
//! Deliberately absent: shuffling, weights of sources, threads, as in [`Stream`](crate::Stream).

use std::sync::Arc;

use crate::stream::check_weights;
use crate::{DataError, Instances, Part, Place, part_of};

/// Instances in B rows.
#[derive(Debug)]
pub struct Rows {
    instances: Arc<Instances>,
    /// B.
    rows: usize,
}

impl Rows {
    /// Of instances that are cut as running text.
    pub fn new(instances: Arc<Instances>, rows: usize) -> Result<Self, DataError> {
        check_weights(instances.corpus())?;
        let this = Self { instances, rows };
        if this.steps() == 0 {
            let problem = format!("expected at most {}: so many sequences the text has", this.instances.units());
            return Err(DataError::InstanceSetting { name: "batch_size", value: rows.to_string(), problem });
        }
        Ok(this)
    }

    /// The same text in other rows.
    pub fn with_rows(self, rows: usize) -> Result<Self, DataError> {
        Self::new(self.instances, rows)
    }

    /// Steps of an epoch. What is left of the text is not read.
    pub fn steps(&self) -> u64 {
        (self.instances.units() as u64).checked_div(self.rows as u64).unwrap_or(0)
    }

    /// B.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// A step of an epoch in equal parts, each of some of the rows.
    pub fn step(&self, place: Place, parts: usize) -> Result<Vec<Part>, DataError> {
        debug_assert!(place.index < self.steps() && self.rows.is_multiple_of(parts));
        let (epoch, per_row) = (self.instances.epoch(place.epoch, 1)?, self.steps());
        let block = |row: usize| epoch.in_order(row as u64 * per_row + place.index);
        let blocks: Vec<_> = (0..self.rows).map(block).collect::<Result<_, _>>()?;
        let in_part = (self.rows / parts.max(1)).max(1);
        Ok(blocks.chunks(in_part).zip((0..).step_by(in_part)).map(|(chunk, first)| part_of(chunk, first)).collect())
    }
}
