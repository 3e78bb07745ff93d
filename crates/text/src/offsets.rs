//! Byte offsets to code point offsets. Rust slices text by bytes; Python, SQuAD's `answer_start` and most JSON clients
//! count Unicode code points.

/// Converts byte ranges of `text` to ranges of Unicode code points.
///
/// The offsets are expected on character boundaries, as [`encode`](crate::Tokenizer::encode) gives them. Any other
/// number counts the code points that begin before it, so that nothing panics.
pub fn code_point_offsets(text: &str, offsets: &[(usize, usize)]) -> Vec<(usize, usize)> {
    if text.is_ascii() {
        return offsets.iter().map(|&(start, end)| (start.min(text.len()), end.min(text.len()))).collect();
    }
    let beginnings: Vec<usize> = text.char_indices().map(|(byte, _)| byte).collect();
    let count_before = |byte: usize| beginnings.partition_point(|&beginning| beginning < byte);
    offsets.iter().map(|&(start, end)| (count_before(start), count_before(end))).collect()
}

/// The byte where code point number `code_point` of `text` begins, or where the text ends if it has just so many; `None`
/// beyond.
pub fn byte_of_code_point(text: &str, code_point: usize) -> Option<usize> {
    text.char_indices().map(|(byte, _)| byte).chain([text.len()]).nth(code_point)
}
