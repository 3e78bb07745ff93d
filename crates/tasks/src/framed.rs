//! Files that henson keeps for itself: a line with the name and version, one with the SHA-256 of the rest, then the rest. A file that is cut or
//! changed anywhere is none.

use sha2::{Digest, Sha256};

/// A body behind its first line and its checksum.
pub(crate) fn framed(first_line: &[u8], body: &[u8]) -> Vec<u8> {
    [first_line, &line(body), body].concat()
}

/// The body of a file, where it is whole and has that first line.
pub(crate) fn body<'b>(first_line: &[u8], bytes: &'b [u8]) -> Option<&'b [u8]> {
    let (sum, body) = bytes.strip_prefix(first_line)?.split_at_checked(65)?;
    (sum == line(body)).then_some(body)
}

/// Bytes in hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn line(body: &[u8]) -> Vec<u8> {
    format!("{}\n", hex(&Sha256::digest(body))).into_bytes()
}
