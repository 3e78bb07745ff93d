//! The vocabulary of a model that reads whole words: made from the texts that it is trained on, and from a file of word vectors
//! where one is given.
//!
//! Words that are too rare to learn a vector are unknown, which is how the vector for unknown words is learned. A word that has a
//! vector in the file is in the vocabulary however rare it is, and so are the file's first words, which are its most frequent:
//! texts to come will have them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use henson_text::{TextError, Tokenizer, WordUnit, WordVectors};
use henson_train::TrainError;

use super::recipe::FineTuneRecipe;
use crate::error::TaskError;
use crate::example::{Input, Set};

/// A tokenizer of whole words, and the vectors that some of them begin with.
pub(super) struct WordModel {
    pub(super) tokenizer: Tokenizer,
    pub(super) vectors: Option<WordTable>,
}

/// Rows of the table of words that are known before training.
#[derive(Clone, Debug, Default)]
pub(super) struct WordTable {
    pub(super) width: usize,
    /// Tokens, and their vectors one after the other.
    pub(super) ids: Vec<u32>,
    pub(super) numbers: Vec<f32>,
}

impl WordTable {
    /// Writes the rows into a table of words.
    pub(super) fn write_into(&self, table: &mut [f32]) {
        for (id, row) in self.ids.iter().zip(self.numbers.chunks_exact(self.width.max(1))) {
            let at = *id as usize * self.width;
            if let Some(to) = table.get_mut(at..at + self.width) {
                to.copy_from_slice(row);
            }
        }
    }
}

/// Makes the vocabulary of a training set.
pub(super) fn word_model(recipe: &FineTuneRecipe, train: &Set) -> Result<WordModel, TaskError> {
    let unit = unit_of(train)?;
    let lowercase = recipe.lowercase.unwrap_or(unit == WordUnit::Texts);
    let counts = count(train, unit, lowercase).map_err(TrainError::from)?;
    let mut vectors = None;
    if !recipe.word_vectors.is_empty() {
        vectors = Some(read_vectors(recipe, &counts)?);
    }
    let known = |word: &str| vectors.as_ref().is_some_and(|vectors| vectors.find(word).is_some());
    let mut words: Vec<&str> = counts
        .iter()
        .filter(|(word, count)| **count >= recipe.min_count || known(word))
        .map(|(w, _)| w.as_str())
        .collect();
    // The most frequent first, as in files of vectors; those that are equally frequent in the order of their letters.
    words.sort_by_key(|word| (std::cmp::Reverse(counts.get(*word).copied().unwrap_or(0)), *word));
    let others = vectors.iter().flat_map(|vectors| vectors.first_words(recipe.vector_words, lowercase, &counts));
    words.extend(others.collect::<Vec<_>>());
    let tokenizer = Tokenizer::of_words(words, lowercase, unit).map_err(TrainError::from)?;
    let vectors = vectors.map(|vectors| vectors.table(&tokenizer));
    Ok(WordModel { tokenizer, vectors })
}

/// How the inputs of a set are divided into words.
fn unit_of(train: &Set) -> Result<WordUnit, TaskError> {
    match train.examples.first().map(|example| &example.input) {
        Some(Input::Words { .. }) => Ok(WordUnit::Words),
        Some(Input::One(_) | Input::Pair(..)) | None => Ok(WordUnit::Texts),
        Some(_) => {
            let expected =
                "the directory of a model: one that reads whole words is for texts, pairs of texts and words to tag";
            Err(TrainError::setting("model", "a size that starts from random weights", expected).into())
        }
    }
}

/// How often each word occurs.
fn count(train: &Set, unit: WordUnit, lowercase: bool) -> Result<BTreeMap<String, u64>, TextError> {
    let empty = Tokenizer::of_words([], lowercase, unit)?;
    let mut counts = BTreeMap::new();
    let mut add = |text: &str| -> Result<(), TextError> {
        for word in empty.words(text)? {
            *counts.entry(word.text).or_insert(0) += 1;
        }
        Ok(())
    };
    for example in &train.examples {
        match &example.input {
            Input::One(text) => add(text)?,
            Input::Pair(first, second) => [first, second].into_iter().try_for_each(|text| add(text))?,
            Input::Words { words, .. } => words.iter().try_for_each(|word| add(word))?,
            _ => {}
        }
    }
    Ok(counts)
}

/// What a file of vectors has for a vocabulary.
struct Found {
    vectors: WordVectors,
    /// The places of words in it.
    places: BTreeMap<String, usize>,
}

impl Found {
    /// A word's place: as it is written, else as it is written in small letters.
    fn find(&self, word: &str) -> Option<usize> {
        self.places.get(word).or_else(|| self.places.get(&word.to_lowercase())).copied()
    }

    /// So many words of the file, from its first on, that the training data does not have.
    fn first_words<'a>(
        &'a self,
        count: usize,
        lowercase: bool,
        known: &'a BTreeMap<String, u64>,
    ) -> impl Iterator<Item = &'a str> {
        let words = self.vectors.words.iter().map(String::as_str);
        words.take(count).filter(move |word| !(known.contains_key(*word) || lowercase && has_capitals(word)))
    }

    fn table(&self, tokenizer: &Tokenizer) -> WordTable {
        let mut table = WordTable { width: self.vectors.width, ..WordTable::default() };
        for id in 0..tokenizer.vocabulary_size() as u32 {
            let word = tokenizer.token(id).filter(|_| !tokenizer.is_special(id));
            if let Some(place) = word.and_then(|word| self.find(&word)) {
                table.ids.push(id);
                table.numbers.extend_from_slice(self.vectors.vector(place));
            }
        }
        table
    }
}

fn has_capitals(word: &str) -> bool {
    word.chars().any(char::is_uppercase)
}

fn read_vectors(recipe: &FineTuneRecipe, counts: &BTreeMap<String, u64>) -> Result<Found, TaskError> {
    let path = Path::new(&recipe.word_vectors);
    let small: BTreeSet<String> = counts.keys().map(|word| word.to_lowercase()).collect();
    let mut wants =
        |word: &str, number: usize| number < recipe.vector_words || counts.contains_key(word) || small.contains(word);
    let vectors = WordVectors::read(path, &mut wants).map_err(TrainError::from)?;
    let mut places = BTreeMap::new();
    for (place, word) in vectors.words.iter().enumerate() {
        // Where one occurs twice, the first is the more frequent.
        places.entry(word.clone()).or_insert(place);
    }
    let found = Found { vectors, places };
    if !counts.is_empty() && counts.keys().all(|word| found.find(word).is_none()) {
        let expected = "vectors of words that the training data has; are they of its language?";
        return Err(TrainError::setting("word_vectors", &recipe.word_vectors, expected).into());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::{Example, Target};
    use crate::task::Task;

    fn set(task: &str, texts: &[&str]) -> Set {
        let task = Task::named(task).unwrap();
        let example = |text: &&str| Example {
            id: String::new(),
            place: String::new(),
            input: Input::One((*text).to_owned()),
            target: Target::None,
        };
        Set::new(task, Vec::new(), texts.iter().map(example).collect())
    }

    fn tokens(tokenizer: &Tokenizer) -> Vec<String> {
        (0..tokenizer.vocabulary_size() as u32).filter_map(|id| tokenizer.token(id)).collect()
    }

    #[test]
    fn rare_words_are_unknown_unless_they_have_a_vector() {
        let train = set("classify", &["The cat, the dog", "the cat"]);
        let recipe = FineTuneRecipe { min_count: 2, ..FineTuneRecipe::default() };
        let specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"];
        let model = word_model(&recipe, &train).unwrap();
        assert_eq!(tokens(&model.tokenizer), [&specials[..], &["the", "cat"]].concat());
        let recipe = FineTuneRecipe { min_count: 1, lowercase: Some(false), ..recipe };
        let model = word_model(&recipe, &train).unwrap();
        assert_eq!(tokens(&model.tokenizer), [&specials[..], &["cat", "the", ",", "The", "dog"]].concat());

        let path = std::env::temp_dir().join(format!("henson-vectors-{}.txt", std::process::id()));
        std::fs::write(&path, "the 1 2\nof 3 4\nIn 5 6\ndog 7 8\nzebra 9 9\n").unwrap();
        let word_vectors = path.display().to_string();
        let recipe = FineTuneRecipe { min_count: 2, word_vectors, vector_words: 3, ..FineTuneRecipe::default() };
        let model = word_model(&recipe, &train).unwrap();
        // `dog` is rare and `zebra` too far behind; `In` has capitals, and texts none.
        assert_eq!(tokens(&model.tokenizer), [&specials[..], &["the", "cat", "dog", "of"]].concat());
        let (mut table, vectors) = (vec![0.0; 8 * 2], model.vectors.unwrap());
        vectors.write_into(&mut table);
        assert_eq!(table[8..], [1.0, 2.0, 0.0, 0.0, 7.0, 8.0, 3.0, 4.0]);
        // Words with capitals have the vector of the word in small letters.
        let recipe = FineTuneRecipe { lowercase: Some(false), ..recipe };
        let model = word_model(&recipe, &train).unwrap();
        let vectors = model.vectors.unwrap();
        let the = model.tokenizer.id("The").unwrap();
        let at = vectors.ids.iter().position(|id| *id == the).unwrap();
        assert_eq!(vectors.numbers[2 * at..2 * at + 2], [1.0, 2.0]);
        std::fs::write(&path, "chat 1 2\n").unwrap();
        let error = word_model(&recipe, &train).err().unwrap().to_string();
        assert!(error.contains("word_vectors") && error.contains("language"), "{error}");
        std::fs::remove_file(path).unwrap();
    }
}
