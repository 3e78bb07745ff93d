//! Members of a zip archive by name, as far as `torch.save` uses the format: stored, not compressed, one file, zip64.
//!
//! The list at the archive's end counts; what stands before each member must agree with it.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Bytes, DAMAGED, TorchError};

pub(super) const LOCAL_SIGNATURE: [u8; 4] = *b"PK\x03\x04";
const CENTRAL_SIGNATURE: [u8; 4] = *b"PK\x01\x02";
const END_SIGNATURE: [u8; 4] = *b"PK\x05\x06";
const END64_SIGNATURE: [u8; 4] = *b"PK\x06\x06";
const LOCATOR64_SIGNATURE: [u8; 4] = *b"PK\x06\x07";

/// Sizes of records without what varies in them.
const LOCAL: u64 = 30;
const CENTRAL: usize = 46;
const END: u64 = 22;
const END64: u64 = 56;
const LOCATOR64: u64 = 20;

/// The longest comment at the end.
const COMMENT_LIMIT: u64 = u16::MAX as u64;

/// The largest list of members: a few hundred thousand.
const LIST_LIMIT: u64 = 16 << 20;

/// The largest member that is read as a whole.
const SMALL: u64 = 64;

/// Extra data of a member: its sizes with 64 bits.
const EXTRA64: u16 = 1;

pub(super) struct Archive<'a> {
    bytes: &'a dyn Bytes,
    members: BTreeMap<String, Entry>,
    /// Where the list of members begins, and the members end.
    list: u64,
}

/// What the list says of a member.
#[derive(Clone, Copy)]
struct Entry {
    flags: u16,
    method: u16,
    crc: u32,
    compressed: u64,
    size: u64,
    /// Where its own header begins.
    header: u64,
}

/// A member that can be read.
pub(super) struct Member {
    /// From its own header to its last byte.
    pub(super) extent: Range<u64>,
    pub(super) bytes: Range<u64>,
    /// `None` where the writer was told to leave it out.
    pub(super) crc: Option<u32>,
}

impl<'a> Archive<'a> {
    pub(super) fn open(bytes: &'a dyn Bytes) -> Result<Self, TorchError> {
        let (count, list) = find_list(bytes)?;
        let length = list.end - list.start;
        if length > LIST_LIMIT {
            return Err(TorchError::Limit { what: "bytes in its list of members", limit: LIST_LIMIT });
        }
        let mut buffer = vec![0; length as usize];
        bytes.read_exact(list.start, &mut buffer)?;
        let mut rest = &buffer[..];
        let mut members = BTreeMap::new();
        for _ in 0..count {
            let (name, entry) = take_entry(&mut rest).ok_or_else(|| wrong("its list of members is cut or damaged"))?;
            if members.contains_key(&name) {
                return Err(wrong(format!("{} is there twice", name.escape_debug())));
            }
            members.insert(name, entry);
        }
        if !rest.is_empty() {
            return Err(wrong("its list of members is longer than their number"));
        }
        Ok(Self { bytes, members, list: list.start })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.members.keys().map(String::as_str)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.members.contains_key(name)
    }

    /// Where a member's bytes are. They lie before the list of members.
    pub(super) fn member(&self, name: &str) -> Result<Member, TorchError> {
        let entry = self.entry(name)?;
        let unusable = |problem: &str| TorchError::Member { name: shown(name), problem: problem.to_owned() };
        if entry.flags & 1 != 0 {
            return Err(unusable("is encrypted"));
        }
        if entry.method != 0 {
            let problem = "is compressed, which torch.save never does: unpack and pack it again without compression";
            return Err(unusable(problem));
        }
        if entry.compressed != entry.size {
            return Err(unusable("has two different sizes; fetch the file again"));
        }
        let outside = || unusable("lies outside of the file; fetch the file again");
        let after = entry.header.checked_add(LOCAL + name.len() as u64).filter(|after| *after <= self.list);
        let after = after.ok_or_else(outside)?;
        let mut header = vec![0; LOCAL as usize + name.len()];
        self.bytes.read_exact(entry.header, &mut header)?;
        let (fixed, own_name) = header.split_at(LOCAL as usize);
        let agrees = fixed.starts_with(&LOCAL_SIGNATURE)
            && u16_at(fixed, 8) == entry.method
            && usize::from(u16_at(fixed, 26)) == name.len()
            && own_name == name.as_bytes();
        if !agrees {
            return Err(unusable("is not where the list of members has it; fetch the file again"));
        }
        let start = after + u64::from(u16_at(fixed, 28));
        let end = start.checked_add(entry.size).filter(|end| *end <= self.list).ok_or_else(outside)?;
        let crc = Some(entry.crc).filter(|crc| *crc != 0);
        Ok(Member { extent: entry.header..end, bytes: start..end, crc })
    }

    /// A member of at most `limit` bytes, after its checksum was compared.
    pub(super) fn checked(&self, name: &str, limit: u64) -> Result<Member, TorchError> {
        let member = self.member(name)?;
        let Member { bytes, crc, .. } = &member;
        if bytes.end - bytes.start > limit {
            return Err(TorchError::Limit { what: "bytes in a member that describes the others", limit });
        }
        let mut hash = crc32fast::Hasher::new();
        let mut buffer = [0; 4096];
        let mut at = bytes.start;
        while at < bytes.end {
            let part = &mut buffer[..(bytes.end - at).min(4096) as usize];
            self.bytes.read_exact(at, part)?;
            hash.update(part);
            at += part.len() as u64;
        }
        match crc.is_some_and(|crc| crc != hash.finalize()) {
            true => Err(TorchError::Member { name: shown(name), problem: DAMAGED.to_owned() }),
            false => Ok(member),
        }
    }

    pub(super) fn read_small(&self, name: &str) -> Result<Vec<u8>, TorchError> {
        let range = self.checked(name, SMALL)?.bytes;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.bytes.read_exact(range.start, &mut bytes)?;
        Ok(bytes)
    }

    fn entry(&self, name: &str) -> Result<Entry, TorchError> {
        let missing =
            || TorchError::Member { name: shown(name), problem: "is missing; fetch the file again".to_owned() };
        self.members.get(name).copied().ok_or_else(missing)
    }
}

/// A file whose members share bytes is none that a program wrote.
pub(super) fn refuse_overlaps(mut members: Vec<Range<u64>>) -> Result<(), TorchError> {
    members.sort_by_key(|member| member.start);
    match members.windows(2).any(|pair| pair[0].end > pair[1].start) {
        true => Err(wrong("its members overlap")),
        false => Ok(()),
    }
}

/// How many members there are, and where their list is.
fn find_list(bytes: &dyn Bytes) -> Result<(u64, Range<u64>), TorchError> {
    let size = bytes.size();
    let cut = || wrong("it has no end, so it is cut short");
    let mut tail = vec![0; size.min(END + COMMENT_LIMIT) as usize];
    bytes.read_exact(size - tail.len() as u64, &mut tail)?;
    let ends_here = |at: &usize| {
        let comment = tail.len() - at - END as usize;
        tail[*at..].starts_with(&END_SIGNATURE) && usize::from(u16_at(&tail[*at..], 20)) == comment
    };
    let last = tail.len().checked_sub(END as usize).ok_or_else(cut)?;
    let at = (0..=last).rev().find(ends_here).ok_or_else(cut)?;
    let record = &tail[at..];
    let end = size - (tail.len() - at) as u64;
    let (count, length, start) = (u16_at(record, 10), u32_at(record, 12), u32_at(record, 16));
    let (count, length, start, limit) = match count == u16::MAX || length == u32::MAX || start == u32::MAX {
        true => find_list64(bytes, end)?,
        false => (count.into(), length.into(), start.into(), end),
    };
    match start.checked_add(length).filter(|list_end| *list_end <= limit) {
        Some(list_end) => Ok((count, start..list_end)),
        None => Err(wrong("its list of members lies outside of the file")),
    }
}

/// Count, length and start of the list by the 64-bit record, and where that record begins.
fn find_list64(bytes: &dyn Bytes, end: u64) -> Result<(u64, u64, u64, u64), TorchError> {
    let missing = || wrong("the 64-bit record of its end is missing or wrong");
    let mut locator = [0; LOCATOR64 as usize];
    bytes.read_exact(end.checked_sub(LOCATOR64).ok_or_else(missing)?, &mut locator)?;
    let start = u64_at(&locator, 8);
    let fits = start.checked_add(END64).is_some_and(|after| after <= end - LOCATOR64);
    if !locator.starts_with(&LOCATOR64_SIGNATURE) || !fits {
        return Err(missing());
    }
    let mut record = [0; END64 as usize];
    bytes.read_exact(start, &mut record)?;
    if !record.starts_with(&END64_SIGNATURE) {
        return Err(missing());
    }
    Ok((u64_at(&record, 32), u64_at(&record, 40), u64_at(&record, 48), start))
}

/// Takes one entry of the list.
fn take_entry(rest: &mut &[u8]) -> Option<(String, Entry)> {
    let fixed = rest.split_off(..CENTRAL)?;
    if !fixed.starts_with(&CENTRAL_SIGNATURE) {
        return None;
    }
    let name = rest.split_off(..usize::from(u16_at(fixed, 28)))?;
    let extra = rest.split_off(..usize::from(u16_at(fixed, 30)))?;
    rest.split_off(..usize::from(u16_at(fixed, 32)))?;
    let (mut size, mut compressed) = (u64::from(u32_at(fixed, 24)), u64::from(u32_at(fixed, 20)));
    let mut header = u64::from(u32_at(fixed, 42));
    let mut wide = extra64(extra);
    // In this order, and only those that do not fit into 32 bits.
    for number in [&mut size, &mut compressed, &mut header] {
        if *number == u64::from(u32::MAX) {
            *number = u64_at(wide.split_off(..8)?, 0);
        }
    }
    let (flags, method, crc) = (u16_at(fixed, 8), u16_at(fixed, 10), u32_at(fixed, 16));
    let name = String::from_utf8(name.to_vec()).ok()?;
    Some((name, Entry { flags, method, crc, compressed, size, header }))
}

/// The 64-bit sizes among a member's extra data.
fn extra64(mut extra: &[u8]) -> &[u8] {
    while let Some(start) = extra.split_off(..4) {
        let Some(data) = extra.split_off(..usize::from(u16_at(start, 2))) else { break };
        if u16_at(start, 0) == EXTRA64 {
            return data;
        }
    }
    &[]
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn wrong(problem: impl Into<String>) -> TorchError {
    TorchError::Archive { problem: problem.into() }
}

/// A name for messages: it comes from the file.
pub(super) fn shown(name: &str) -> String {
    name.escape_debug().to_string()
}
