//! The file that keeps what teachers said about the examples of a set.
//!
//! Behind what [`crate::framed`] puts before it: the number of examples (u64) and for each the number of its instances (u32), for each of these
//! the number of its values (u32) and the values (f32), all little-endian. Whatever is not exactly that is no such file. Nothing is allocated
//! for a count before its bytes are there.

use crate::forms::Soft;
use crate::framed;

/// How the file begins.
const MAGIC: &[u8] = b"henson teacher outputs 1\n";

/// The file of what teachers said.
pub(crate) fn written(all: &[Soft]) -> Vec<u8> {
    let mut body = (all.len() as u64).to_le_bytes().to_vec();
    for soft in all {
        body.extend((soft.len() as u32).to_le_bytes());
        for values in soft {
            body.extend((values.len() as u32).to_le_bytes());
            values.iter().for_each(|x| body.extend(x.to_le_bytes()));
        }
    }
    framed::framed(MAGIC, &body)
}

/// What a file says, where it is exactly such a one.
pub(crate) fn parse(bytes: &[u8]) -> Option<Vec<Soft>> {
    let (count, mut rest) = framed::body(MAGIC, bytes)?.split_first_chunk::<8>()?;
    let count_of = |rest: &mut &[u8]| -> Option<usize> {
        let (count, behind) = rest.split_first_chunk::<4>()?;
        *rest = behind;
        usize::try_from(u32::from_le_bytes(*count)).ok()
    };
    let mut all = Vec::new();
    for _ in 0..u64::from_le_bytes(*count) {
        let mut soft = Vec::new();
        for _ in 0..count_of(&mut rest)? {
            let bytes = count_of(&mut rest)?.checked_mul(4)?;
            let (values, behind) = rest.split_at_checked(bytes)?;
            rest = behind;
            let (values, _) = values.as_chunks::<4>();
            soft.push(values.iter().map(|x| f32::from_le_bytes(*x)).collect());
        }
        all.push(soft);
    }
    rest.is_empty().then_some(all)
}

/// Bytes as a whole file, and as a body in a right frame: what is accepted is written the same again. For `fuzz/` alone.
pub fn fuzz(bytes: &[u8]) {
    for file in [bytes.to_vec(), framed::framed(MAGIC, bytes)] {
        if let Some(all) = parse(&file) {
            assert!(written(&all) == file, "{} bytes are written otherwise than they were read", file.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_they_were_written_or_not_at_all() {
        let all = vec![vec![vec![1.0, -0.0], Vec::new()], Vec::new(), vec![vec![f32::MIN_POSITIVE]]];
        let bytes = written(&all);
        assert_eq!(parse(&bytes), Some(all));
        for cut in 0..bytes.len() {
            assert_eq!(parse(&bytes[..cut]), None, "{cut}");
            let mut changed = bytes.clone();
            changed[cut] ^= 1;
            assert_eq!(parse(&changed), None, "{cut}");
        }
        // A right sum over wrong counts.
        let mut body = u64::MAX.to_le_bytes().to_vec();
        body.extend(u32::MAX.to_le_bytes());
        assert_eq!(parse(&framed::framed(MAGIC, &body)), None);
    }
}
