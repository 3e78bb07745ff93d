//! How alike two texts are, by vectors that each has for itself. Without a `loss` in the recipe, on the device:
//!
//! By contrast: of all second texts in a batch, a first text shall be most like its own (van den Oord et
//! al. 2018; the ranking loss with multiple negatives of Henderson et al. 2017). Texts that are said to mean something else
//! stand among those to choose from. Or by scores: the cosine of two texts' vectors shall be a given number.
//!
//! With one, by [`crate::sentences`], on the host.
//!
//! Legend: Q pairs in a part of a batch, C texts to choose from: Q second ones, then those that mean something else.

use std::collections::HashMap;

use henson_infer::{EmbedSettings, Pooling, Prompts};
use henson_train::TrainError;
use serde_json::Value;

use super::embed_rows::{asks_for_vectors, check_loss, keep_for, partners_in, report_twins, target_of, unlike};
use super::regress::unrelated;
use super::*;
use crate::finetune::{Poolings, VectorObjective, thin};
use crate::metrics::{PairScores, cosine, nearest, pearson, spearman};
use crate::predict::TOGETHER;
use crate::sentences::{SentenceLoss, VectorLoss};

/// What is added to the similarity of a text that may not be chosen.
const NEVER: f32 = -1e9;

pub(crate) static EMBED: Form = Form {
    // Pairs that are alike need no more than each other.
    needs_targets: false,
    second_text: SecondText::Needed,
    picks_rows: true,
    learns_on_host: true,
    metrics: &["spearman", "pearson", "accuracy", "average_precision", "best_accuracy", "best_f1", "triplet_accuracy"],
    library: "sentence-transformers",
    ..Form::new(Head::Encoder, "sentence-similarity", "SentenceTransformer", "embed --model DIR 'A text.'", &Embed)
};

#[derive(Debug)]
struct Embed;

impl Steps for Embed {
    /// A pair for each of a list of partners.
    fn inputs(&self, cells: &Cells<'_>) -> Result<Vec<Input>, TaskError> {
        let (first, unlike) = (cells.first.clone(), unlike(cells)?);
        let seconds = match &cells.second {
            Some((column, value @ Value::Array(_))) => partners_in(cells, column, value)?,
            _ => vec![cells.second_text()?.unwrap_or_default()],
        };
        let pair = |second| Input::Alike { first: first.clone(), second, unlike: unlike.clone() };
        Ok(seconds.into_iter().map(pair).collect())
    }

    fn target(&self, cells: &Cells<'_>, collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        match collector.reading.loss {
            None => cells.number(),
            Some(loss) => target_of(loss, cells, collector),
        }
    }

    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::Alike { first, second, unlike } = input else { return Ok(Prepared::Plain(Vec::new())) };
        // An empty second text is none.
        let texts = [first, second].into_iter().filter(|text| !text.is_empty()).chain(unlike);
        let each = texts.map(|text| tokenizer.template().single(&tokenizer.encode(text)?, lengths.most));
        Ok(Prepared::Plain(each.collect::<Result<_, _>>()?))
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let sequences = prepared.into_sequences();
        // A cosine is between two, and so is a class.
        let (sequences, numbers, labels) = match target {
            Target::Number(cosine) => (sequences.take(2).collect(), vec![*cosine as f32], Vec::new()),
            Target::Class(class) => (sequences.take(2).collect(), Vec::new(), vec![Some(*class)]),
            Target::Numbers(numbers) => (sequences.collect(), numbers.clone(), Vec::new()),
            _ => (sequences.collect(), Vec::new(), Vec::new()),
        };
        vec![Instance { sequences, numbers, labels, ..Instance::default() }]
    }

    fn lesson(&self) -> Option<Lesson> {
        Some(Lesson::Vectors)
    }

    fn taught(&self, prepared: Prepared, _target: &Target, labels: usize) -> Vec<Instance> {
        self.instances(prepared, &Target::None, labels)
    }

    fn digest(&self, instance: &Instance) -> String {
        match (&instance.labels[..], &instance.numbers[..]) {
            ([], []) => "Alike".to_owned(),
            ([], [cosine]) => format!("Cosine({cosine:?})"),
            ([], numbers) => format!("Numbers({numbers:?})"),
            (labels, _) => format!("Class({})", joined(labels)),
        }
    }

    /// Classes of pairs are learned from alone: no model says them.
    fn label_names(&self, _train: &Set) -> Vec<String> {
        Vec::new()
    }

    /// Vectors stand where others have logits.
    fn scores(&self, _problem: Option<Problem>, _prepared: &Prepared, logits: &[Vec<f32>]) -> Scores {
        logits.to_vec()
    }

    fn predict(&self, said: Said<'_>) -> Prediction {
        compared(said.scores)
    }

    /// By vectors that are made as each model's directory says.
    fn predict_set(
        &self,
        models: &[henson_infer::Model],
        set: &Set,
        settings: &PredictSettings,
        each: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Prediction>, TaskError> {
        let mut all: Vec<Prediction> = Vec::with_capacity(set.examples.len());
        for (number, model) in models.iter().enumerate() {
            let mut own = EmbedSettings::of_directory(model.path())?;
            own.most_tokens = settings.max_length.or(own.most_tokens);
            for (i, examples) in set.examples.chunks(TOGETHER).enumerate() {
                let done = i * TOGETHER;
                if each((number * set.examples.len() + done) / models.len()).is_break() {
                    return Err(TaskError::Stopped);
                }
                let of_examples: Vec<Vec<&str>> = examples.iter().map(|example| texts_of(&example.input)).collect();
                let texts: Vec<&str> = of_examples.concat();
                // All texts of a row have its number.
                let numbers = of_examples.iter().enumerate().flat_map(|(i, texts)| vec![done + i + 1; texts.len()]);
                let numbers: Vec<usize> = numbers.collect();
                let vectors = model
                    .embed(&texts, &own, settings.windows.unwrap_or(false))
                    .map_err(|error| error.numbered(&numbers))?;
                let mut vectors = vectors.into_iter().map(|embedding| embedding.vector);
                for (k, texts) in of_examples.iter().enumerate() {
                    let prediction = compared(vectors.by_ref().take(texts.len()).collect());
                    match (all.get_mut(done + k), prediction) {
                        // Vectors of different models are in different spaces.
                        (
                            Some(Prediction::Similarity { cosine, vectors, negative }),
                            Prediction::Similarity { cosine: more, negative: another, .. },
                        ) => {
                            *cosine += (more - *cosine) / (number + 1) as f64;
                            *vectors = None;
                            if let (Some(negative), Some(another)) = (negative.as_mut(), another) {
                                *negative += (another - *negative) / (number + 1) as f64;
                            }
                        }
                        (_, prediction) => all.push(prediction),
                    }
                }
            }
        }
        Ok(all)
    }

    /// The sequences of a part in the order of the legend: first texts, second ones, others.
    ///
    /// Where only some pairs have others, these are filled up to one of few numbers with a short text that nobody may choose: a
    /// GPU plays a pass again that had the same number of sequences.
    fn sequences<'a>(&self, instances: &[&'a Instance]) -> Vec<Sequence<'a>> {
        let of = |place: usize| instances.iter().filter_map(move |instance| instance.sequences.get(place));
        let most = instances.iter().map(|instance| instance.sequences.len()).max().unwrap_or(0);
        let all = (0..most).flat_map(of).map(|(ids, segments)| Sequence { ids, segments });
        let mut all: Vec<Sequence<'a>> = all.collect();
        let others = all.len() - 2 * instances.len();
        let filled = others.next_multiple_of((instances.len() / 8).max(1));
        if let Some(short) = all.iter().min_by_key(|sequence| sequence.ids.len()).copied() {
            all.extend(std::iter::repeat_n(short, filled - others));
        }
        all
    }

    fn host(&self, recipe: &FineTuneRecipe, train: &Set, width: usize) -> TrainResult<Option<HostObjective>> {
        let loss = match recipe.loss {
            Some(loss) => loss,
            None if !asks_for_vectors(recipe) => return Ok(None),
            None if train.is_labelled() => SentenceLoss::Cosine,
            None => SentenceLoss::Ranking,
        };
        let poolings = recipe.poolings();
        let (width, mut dims) = (poolings.len() * width, recipe.matryoshka.clone());
        if let Some(dim) = dims.iter().find(|dim| **dim == 0 || **dim > width) {
            return Err(TrainError::setting("matryoshka", dim, format!("1 to {width}, the width of the vectors")));
        }
        if !dims.is_empty() && !dims.contains(&width) {
            dims.insert(0, width);
        }
        let teacher = train.examples.iter().find(|example| match &example.target {
            Target::Numbers(numbers) => loss == SentenceLoss::Mse && numbers.len() != width,
            _ => false,
        });
        if let Some(example) = teacher {
            let expected = format!("vectors of {width} numbers, as the model has; {} has others", example.place);
            return Err(TrainError::setting("loss", "mse", expected));
        }
        let loss = VectorLoss {
            loss,
            temperature: recipe.temperature,
            margin: recipe.margin.unwrap_or(loss.usual_margin()),
            distance: recipe.distance.unwrap_or(loss.usual_distance()),
            symmetric: recipe.symmetric,
            normalise: recipe.normalize.unwrap_or(loss.usually_normalised()),
            dims: dims.into_iter().map(|dim| (dim, 1.0)).collect(),
        };
        let classes = if loss.loss == SentenceLoss::Softmax { train.labels.len() } else { 0 };
        let objective = VectorObjective { loss, poolings, classes, cached: recipe.cached_gradients, head: None };
        Ok(Some(HostObjective::Vectors(objective)))
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        match part.instances.first().is_some_and(|instance| instance.is_contrast()) {
            true => Ok(Box::new(Alike::new(device, part)?)),
            false => Ok(Box::new(Cosines::new(device, part)?)),
        }
    }

    fn choose(&self, recipe: &mut FineTuneRecipe, model: &Path) -> Result<(), TaskError> {
        let own = own_settings(recipe, model)?.pooling;
        if recipe.pooling.is_none() && own != [Pooling::Mean] {
            recipe.pooling = Some(Poolings::new(own));
        }
        Ok(())
    }

    fn check(&self, recipe: &FineTuneRecipe, model: &Path) -> Result<(), TaskError> {
        let own = own_settings(recipe, model)?;
        let wrong = [
            (recipe.freeze, "freeze", "true".to_owned(), "false: nothing but the encoder makes the vectors"),
            (
                recipe.windows,
                "windows",
                "true".to_owned(),
                "false: training uses the beginnings of both texts of a pair",
            ),
            (
                recipe.batch_size < 2,
                "batch_size",
                recipe.batch_size.to_string(),
                "at least 2: the negatives of a pair are the other pairs of its batch",
            ),
            (
                recipe.limit == Some(1),
                "limit",
                "1".to_owned(),
                "at least 2: the negatives of a pair are the other pairs of its batch",
            ),
            (
                !own.layers.is_empty(),
                "model",
                recipe.model.clone(),
                "a model without dense layers after its pooling: these are not trained",
            ),
            (recipe.poolings().is_empty(), "pooling", "[]".to_owned(), "the name of a pooling, or a list of names"),
        ];
        match wrong.into_iter().find(|(wrong, ..)| *wrong) {
            Some((_, key, got, expected)) => Err(TrainError::setting(key, got, expected).into()),
            None => check_loss(recipe),
        }
    }

    fn pick_rows(&self, train: &mut Set, recipe: &FineTuneRecipe, dropout: bool) -> Result<(), TaskError> {
        match recipe.loss {
            None => keep_alike(train, recipe)?,
            Some(loss) => keep_for(loss, train, recipe)?,
        }
        thin(&mut train.examples, recipe.limit);
        report_twins(train);
        check_parts(train, recipe)?;
        check_partners(train, dropout)
    }

    fn add_files(
        &self,
        files: &mut ModelFiles,
        recipe: &FineTuneRecipe,
        hidden_size: usize,
        max_length: usize,
    ) -> TrainResult<()> {
        let normalise = recipe.normalize.unwrap_or(recipe.loss.is_none_or(SentenceLoss::usually_normalised));
        let (pooling, most_tokens) = (recipe.poolings(), Some(max_length));
        let vectors = EmbedSettings { pooling, normalise, most_tokens, ..EmbedSettings::default() };
        files.files.extend(vectors.files(hidden_size));
        // What it was told about prompts stays true; a size was told nothing.
        if !recipe.is_from_scratch() {
            let prompts = Prompts::of_directory(recipe.directory()).map_err(|error| TrainError::Task(error.into()))?;
            files.files.extend(prompts.file());
        }
        Ok(())
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        if set.is_labelled() { similarities(set, predictions) } else { partners(set, predictions) }
    }

    fn degenerate(&self, _set: &Set, predictions: &[Prediction], score: &Score) -> Option<String> {
        unrelated(predictions, score)
    }

    fn prediction(&self, _set: &mut Set, found: &Found) -> Result<Prediction, String> {
        Ok(Prediction::Similarity { cosine: found.number()?, vectors: None, negative: None })
    }
}

/// How a model's directory makes vectors; from random weights, by the mean.
fn own_settings(recipe: &FineTuneRecipe, model: &Path) -> Result<EmbedSettings, TaskError> {
    match recipe.is_from_scratch() {
        true => Ok(EmbedSettings::default()),
        false => Ok(EmbedSettings::of_directory(model)?),
    }
}

/// The texts of an example, each with a vector of its own.
pub(super) fn texts_of(input: &Input) -> Vec<&str> {
    match input {
        Input::Alike { first, second, unlike } => {
            [first, second].into_iter().chain(unlike).map(String::as_str).collect()
        }
        _ => Vec::new(),
    }
}

/// How alike the first two of an example's vectors are, and how near the nearest of the others is.
fn compared(vectors: Vec<Vec<f32>>) -> Prediction {
    let mut vectors = vectors.into_iter();
    let (Some(first), Some(second)) = (vectors.next(), vectors.next()) else { return Prediction::None };
    let negative = vectors.map(|other| cosine(&first, &other)).reduce(f64::max);
    Prediction::Similarity { cosine: cosine(&first, &second), vectors: Some([first, second]), negative }
}

/// Cosines against scores of any scale.
fn similarities(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    let (mut expected, mut predicted) = (Vec::new(), Vec::new());
    for (example, prediction) in set.examples.iter().zip(predictions) {
        let (Target::Number(right), Prediction::Similarity { cosine, .. }) = (&example.target, prediction) else {
            return Err(wrong_kind(set, example));
        };
        expected.push(*right);
        predicted.push(*cosine);
    }
    let mut metrics = vec![("spearman", spearman(&expected, &predicted)), ("pearson", pearson(&expected, &predicted))];
    // Scores that are labels: how well a threshold tells them.
    let labels: Vec<bool> = expected.iter().map(|score| *score == 1.0).collect();
    let both = labels.contains(&true) && labels.contains(&false);
    if both && expected.iter().all(|score| *score == 0.0 || *score == 1.0) {
        let scores = PairScores::new(&labels, &predicted);
        metrics.extend([
            ("average_precision", scores.average_precision),
            ("best_accuracy", scores.accuracy),
            ("best_accuracy_threshold", scores.accuracy_threshold),
            ("best_f1", scores.f1),
            ("best_f1_threshold", scores.f1_threshold),
        ]);
    }
    Ok(Score { metrics, ..Score::default() })
}

/// Whether each pair's second text is the nearest to its first, among those of other pairs.
fn partners(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    let mut pairs: Vec<[&[f32]; 2]> = Vec::new();
    for (example, prediction) in set.examples.iter().zip(predictions) {
        match prediction {
            Prediction::Similarity { vectors: Some([first, second]), .. } => pairs.push([first, second]),
            Prediction::Similarity { vectors: None, .. } => {
                let needed = "cosines alone can only be compared with scores; give a model, or a file with scores";
                return Err(TaskError::NoLabels { path: set.path.clone(), needed });
            }
            _ => return Err(wrong_kind(set, example)),
        }
    }
    let second = |example: &Example| match &example.input {
        Input::Alike { second, .. } => second.clone(),
        _ => String::new(),
    };
    let seconds: Vec<String> = set.examples.iter().map(second).collect();
    let found = nearest(&pairs, &seconds);
    let wrong = found.iter().enumerate().filter(|(own, found)| Some(*own) != **found);
    let mistakes: Vec<Mistake> = wrong
        .map(|(own, found)| {
            let to = |other: usize| cosine(pairs[own][0], pairs[other][1]);
            let (other, lead) = match found {
                Some(found) => (seconds[*found].clone(), to(*found) - to(own)),
                None => ("(a vector is not a number)".to_owned(), 0.0),
            };
            mistake(&set.examples[own], seconds[own].clone(), other, lead)
        })
        .collect();
    let accuracy = 1.0 - mistakes.len() as f64 / pairs.len().max(1) as f64;
    let mut metrics = vec![("accuracy", accuracy)];
    // Of triplets, those whose second text is nearer than all that mean something else.
    let triplets = predictions.iter().map(|prediction| match prediction {
        Prediction::Similarity { cosine, negative: Some(negative), .. } => Some(cosine > negative),
        _ => None,
    });
    if let Some(right) = triplets.collect::<Option<Vec<bool>>>() {
        let share = right.iter().filter(|right| **right).count() as f64 / right.len().max(1) as f64;
        metrics.push(("triplet_accuracy", share));
    }
    Ok(Score { metrics, mistakes, ..Score::default() })
}

/// The negatives of a pair are the others of the same part of a batch, so that none may have a single pair; scores are learned pair by
/// pair.
fn check_parts(train: &Set, recipe: &FineTuneRecipe) -> Result<(), TaskError> {
    let (size, most) = (recipe.batch_size, recipe.batch_size / 2);
    let in_batch = recipe.loss.is_none_or(SentenceLoss::is_in_batch) && !recipe.cached_gradients;
    if train.is_labelled() || recipe.accumulation <= most || !in_batch {
        return Ok(());
    }
    let expected = format!(
        "at most {most}, half of batch_size ({size}): a part needs two pairs, since the negatives of a pair are the others of its part"
    );
    Err(TrainError::setting("accumulation", recipe.accumulation, expected).into())
}

/// Refuses pairs of a text with itself alone where nothing makes their two vectors differ.
fn check_partners(train: &Set, dropout: bool) -> Result<(), TaskError> {
    let is_itself = |example: &Example| match &example.input {
        Input::Alike { first, second, unlike } => first == second && unlike.is_empty(),
        _ => false,
    };
    if dropout || train.is_labelled() || !train.examples.iter().all(is_itself) {
        return Ok(());
    }
    let expected = "more than 0, since every pair is a text with itself and only dropout makes its two vectors differ: \
                    --set dropout=0.1";
    Err(TrainError::setting("dropout", 0, expected).into())
}

/// Leaves the pairs that mean the same, without their scores; or all with theirs as cosines, the least as 0 and the largest as 1.
pub(super) fn keep_alike(train: &mut Set, recipe: &FineTuneRecipe) -> Result<(), TaskError> {
    let score_of = |example: &Example| match example.target {
        Target::Number(score) => Some(score),
        _ => None,
    };
    match (recipe.min_score, train.is_labelled()) {
        (None, false) => {}
        (Some(least), true) => {
            train.examples.retain(|example| score_of(example).is_some_and(|score| score >= least));
            train.examples.iter_mut().for_each(|example| example.target = Target::None);
        }
        (None, true) => {
            let scores = || train.examples.iter().filter_map(score_of);
            let (least, most) = (scores().fold(f64::MAX, f64::min), scores().fold(f64::MIN, f64::max));
            if least >= most {
                let reason = format!("all have the score {least}; leave the column out, or set min_score");
                return Err(TaskError::Empty { path: train.path.clone(), task: train.task.name, reason });
            }
            for example in &mut train.examples {
                if let Target::Number(score) = &mut example.target {
                    *score = (*score - least) / (most - least);
                }
            }
        }
        (Some(least), false) => {
            let expected = "nothing, since the training file has no scores (name their column by --label-column)";
            return Err(TrainError::setting("min_score", least, expected).into());
        }
    }
    if train.examples.len() < 2 {
        let reason = format!("{} similar pairs, and the negatives of a pair are other pairs", train.examples.len());
        return Err(TaskError::Empty { path: train.path.clone(), task: train.task.name, reason });
    }
    Ok(())
}

/// What a part of a batch needs beside its sequences.
struct Alike {
    /// Q: the place of each first text's own partner.
    targets: Tensor,
    /// Q: what each counts.
    weights: Tensor,
    /// Q×C: 0, or [`NEVER`].
    added: Tensor,
    temperature: f32,
}

impl Alike {
    fn new(device: &Device, part: &Part<'_>) -> TrainResult<Self> {
        let q = part.instances.len();
        let real = part.instances.iter().map(|instance| instance.sequences.len()).sum();
        let added = added(&EMBED.sequences(part.instances), q, real);
        let targets: Vec<u32> = (0..q as u32).collect();
        Ok(Self {
            targets: Tensor::from_slice(device, [q], &targets)?,
            weights: Tensor::from_slice(device, [q], &vec![part.scale; q])?,
            added: Tensor::from_slice(device, [q, added.len() / q.max(1)], &added)?,
            temperature: part.temperature,
        })
    }
}

impl Loss for Alike {
    /// Σ weight·(−ln of the softmax of cosine/temperature at the partner).
    fn of(&self, _model: &Model, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> TrainResult<Vec<Tensor>> {
        let vectors = pass.unit_means(&last, layout)?;
        let scores = pass.similarities(&vectors, 1.0 / self.temperature, &self.added)?;
        let candidates = scores.tensor().columns();
        Ok(vec![pass.cross_entropy(scores, candidates, &self.targets, Some(&self.weights), 1.0)?.0])
    }
}

/// What a part of a batch with scores needs beside its sequences.
struct Cosines {
    /// Q.
    targets: Tensor,
    /// Q×Q zeros.
    zeros: Tensor,
    /// Q: where a pair's own cosine stands among those of all.
    own: Tensor,
    scale: f32,
}

impl Cosines {
    fn new(device: &Device, part: &Part<'_>) -> TrainResult<Self> {
        let targets = part.numbers();
        let q = targets.len();
        let own: Vec<u32> = (0..q).map(|i| (i * (q + 1)) as u32).collect();
        Ok(Self {
            targets: Tensor::from_slice(device, [q], &targets)?,
            zeros: Tensor::from_slice(device, [q, q], &vec![0.0; q * q])?,
            own: Tensor::from_slice(device, [q], &own)?,
            scale: part.scale,
        })
    }
}

impl Loss for Cosines {
    /// scale·Σ (cosine − target)². The cosines of all with all are a small matter
    /// beside the encoder, and need nothing that is not there.
    fn of(&self, _model: &Model, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> TrainResult<Vec<Tensor>> {
        let vectors = pass.unit_means(&last, layout)?;
        let all = pass.similarities(&vectors, 1.0, &self.zeros)?;
        let all = all.reshape([all.tensor().shape().elements(), 1])?;
        let own = pass.gather(&all, &self.own)?;
        Ok(vec![pass.squared_error(own, &self.targets, self.scale)?])
    }
}

/// Which texts may not be chosen: a pair's own texts, where they occur again, and the other partners of the same first text.
/// They are not wrong, only not asked for. Nor may those after the `real` ones.
fn added(sequences: &[Sequence<'_>], q: usize, real: usize) -> Vec<f32> {
    not_asked_for(sequences, q, real).into_iter().map(|never| if never { NEVER } else { 0.0 }).collect()
}

/// The same, by whether.
pub(crate) fn not_asked_for(sequences: &[Sequence<'_>], q: usize, real: usize) -> Vec<bool> {
    let mut numbers: HashMap<&[u32], usize> = HashMap::new();
    let texts: Vec<usize> = sequences
        .iter()
        .map(|sequence| {
            let next = numbers.len();
            *numbers.entry(sequence.ids).or_insert(next)
        })
        .collect();
    let (first, candidates) = texts.split_at(q);
    let never = |i: usize, j: usize| {
        let own = candidates[j] == first[i] || candidates[j] == candidates[i];
        j != i && (own || first.get(j) == Some(&first[i]) || q + j >= real)
    };
    let each = (0..q).flat_map(|i| (0..candidates.len()).map(move |j| (i, j)));
    each.map(|(i, j)| never(i, j)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_texts_that_may_be_wrong_are_to_choose_from() {
        let instance = |texts: &[u32]| Instance {
            sequences: texts.iter().map(|text| (vec![1, *text], vec![0, 0])).collect(),
            ..Instance::default()
        };
        // The first text of two pairs is the second one of the last.
        let all = [instance(&[5, 6, 7]), instance(&[8, 9]), instance(&[5, 10, 6]), instance(&[11, 5])];
        let sequences_of = |all: &[Instance]| {
            let all: Vec<&Instance> = all.iter().collect();
            EMBED.sequences(&all).iter().map(|sequence| sequence.ids[1]).collect::<Vec<u32>>()
        };
        assert_eq!(sequences_of(&all), [5, 8, 5, 11, 6, 9, 10, 5, 7, 6]);
        let added = added(&EMBED.sequences(&all.iter().collect::<Vec<_>>()), 4, 10);
        let may: Vec<String> =
            added.chunks(6).map(|row| row.iter().map(|x| if *x == 0.0 { 'x' } else { '-' }).collect()).collect();
        assert_eq!(may, ["xx--x-", "xxxxxx", "-xx-xx", "xxxxxx"]);

        // 32 pairs, of which five have others: these become eight.
        let mut many: Vec<Instance> = (0..32).map(|i| instance(&[2 * i, 2 * i + 1])).collect();
        many.iter_mut().take(5).for_each(|pair| pair.sequences.push((vec![1, 99], vec![0, 0])));
        let many: Vec<&Instance> = many.iter().collect();
        assert_eq!((EMBED.sequences(&many).len(), EMBED.sequences(&many[5..]).len()), (64 + 8, 54));
        let added = super::added(&EMBED.sequences(&many), 32, 64 + 5);
        assert!(added.chunks(40).all(|row| row[..37].iter().all(|x| *x == 0.0) && row[37..] == [NEVER; 3]));
    }
}
