//! Porter's stemmer (Porter 1980) with the changes that NLTK makes by default, which is what rouge-score uses. For words of small ASCII
//! letters and digits.

/// Words that the rules would take apart wrongly.
const IRREGULAR: [(&str, &str); 16] = [
    ("sky", "sky"),
    ("skies", "sky"),
    ("dying", "die"),
    ("lying", "lie"),
    ("tying", "tie"),
    ("news", "news"),
    ("innings", "inning"),
    ("inning", "inning"),
    ("outings", "outing"),
    ("outing", "outing"),
    ("cannings", "canning"),
    ("canning", "canning"),
    ("howe", "howe"),
    ("proceed", "proceed"),
    ("exceed", "exceed"),
    ("succeed", "succeed"),
];

/// A suffix, and what it becomes.
type Rule = (&'static str, &'static str);

const STEP_1A: [Rule; 4] = [("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")];

const STEP_2: [Rule; 21] = [
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("bli", "ble"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
    ("fulli", "ful"),
];

const STEP_3: [Rule; 7] =
    [("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", "")];

const STEP_4: [Rule; 19] = [
    ("al", ""),
    ("ance", ""),
    ("ence", ""),
    ("er", ""),
    ("ic", ""),
    ("able", ""),
    ("ible", ""),
    ("ant", ""),
    ("ement", ""),
    ("ment", ""),
    ("ent", ""),
    ("ion", ""),
    ("ou", ""),
    ("ism", ""),
    ("ate", ""),
    ("iti", ""),
    ("ous", ""),
    ("ive", ""),
    ("ize", ""),
];

/// The stem of a word.
pub fn stem(word: &str) -> String {
    if let Some((_, stem)) = IRREGULAR.iter().find(|(irregular, _)| *irregular == word) {
        return (*stem).to_owned();
    }
    if word.len() <= 2 {
        return word.to_owned();
    }
    let mut word = word.to_owned();
    plural(&mut word);
    past_or_gerund(&mut word);
    // A `y` after a consonant that is not the first letter.
    if let Some(stem) = word.strip_suffix('y')
        && stem.len() > 1
        && is_consonant(stem.as_bytes(), stem.len() - 1)
    {
        word = format!("{stem}i");
    }
    derived(&mut word);
    apply(&mut word, &STEP_3, |stem, _| measure(stem) > 0);
    apply(&mut word, &STEP_4, |stem, suffix| measure(stem) > 1 && (suffix != "ion" || stem.ends_with(['s', 't'])));
    if let Some(stem) = word.strip_suffix('e')
        && (measure(stem) > 1 || (measure(stem) == 1 && !ends_short(stem)))
    {
        word.pop();
    }
    if word.ends_with("ll") && measure(&word[..word.len() - 1]) > 1 {
        word.pop();
    }
    word
}

/// Step 1a.
fn plural(word: &mut String) {
    match word.len() == 4 && word.ends_with("ies") {
        true => word.truncate(3),
        false => apply(word, &STEP_1A, |_, _| true),
    }
}

/// Step 1b.
fn past_or_gerund(word: &mut String) {
    if word.ends_with("ied") {
        word.truncate(if word.len() == 4 { 3 } else { word.len() - 2 });
        return;
    }
    if let Some(stem) = word.strip_suffix("eed") {
        if measure(stem) > 0 {
            word.pop();
        }
        return;
    }
    let stem = ["ed", "ing"].iter().filter_map(|suffix| word.strip_suffix(suffix)).find(|stem| has_vowel(stem));
    let Some(length) = stem.map(str::len) else { return };
    word.truncate(length);
    if ["at", "bl", "iz"].iter().any(|end| word.ends_with(end)) {
        word.push('e');
    } else if ends_double(word) {
        if !word.ends_with(['l', 's', 'z']) {
            word.pop();
        }
    } else if measure(word) == 1 && ends_short(word) {
        word.push('e');
    }
}

/// Step 2. `alli` comes first, and what it leaves goes through the step again.
fn derived(word: &mut String) {
    if word.strip_suffix("alli").is_some_and(|stem| measure(stem) > 0) {
        word.truncate(word.len() - 2);
    }
    // Of `logi`, the `l` counts as a part of the stem.
    match word.strip_suffix("ogi").filter(|stem| stem.ends_with('l')) {
        Some(stem) if measure(stem) > 0 => word.truncate(word.len() - 1),
        Some(_) => {}
        None => apply(word, &STEP_2, |stem, _| measure(stem) > 0),
    }
}

/// Replaces the first of the suffixes that a word has, if the condition holds of what is before it.
fn apply(word: &mut String, rules: &[Rule], holds: impl Fn(&str, &str) -> bool) {
    let Some((suffix, replacement)) = rules.iter().find(|(suffix, _)| word.ends_with(suffix)) else { return };
    let length = word.len() - suffix.len();
    if holds(&word[..length], suffix) {
        word.truncate(length);
        word.push_str(replacement);
    }
}

/// For each letter whether it is a consonant: `y` is one at the beginning and after a vowel.
fn consonants(word: &str) -> impl Iterator<Item = bool> {
    word.bytes().scan(false, |before, letter| {
        *before = match letter {
            b'a' | b'e' | b'i' | b'o' | b'u' => false,
            b'y' => !*before,
            _ => true,
        };
        Some(*before)
    })
}

fn is_consonant(word: &[u8], at: usize) -> bool {
    // A run of `y` is consonant and vowel in turn.
    let start = word[..at].iter().rposition(|letter| *letter != b'y').unwrap_or(0);
    let text = std::str::from_utf8(&word[start..=at]).unwrap_or_default();
    consonants(text).last().unwrap_or(true)
}

/// How often a vowel is followed by a consonant: the paper's m.
fn measure(word: &str) -> usize {
    let (mut count, mut vowel) = (0, false);
    for consonant in consonants(word) {
        count += usize::from(vowel && consonant);
        vowel = !consonant;
    }
    count
}

fn has_vowel(word: &str) -> bool {
    consonants(word).any(|consonant| !consonant)
}

/// Ends with the same consonant twice.
fn ends_double(word: &str) -> bool {
    let letters = word.as_bytes();
    letters.len() >= 2
        && letters[letters.len() - 1] == letters[letters.len() - 2]
        && is_consonant(letters, letters.len() - 1)
}

/// Ends with consonant, vowel, consonant, of which the last is not w, x or y; or is a vowel and a consonant.
fn ends_short(word: &str) -> bool {
    let letters = word.as_bytes();
    let consonant = |from_end: usize| is_consonant(letters, letters.len() - from_end);
    match letters.len() {
        0 | 1 => false,
        2 => !consonant(2) && consonant(1),
        _ => consonant(3) && !consonant(2) && consonant(1) && !word.ends_with(['w', 'x', 'y']),
    }
}
