//! Classes and numbers as texts that an encoder-decoder writes, as T5 learns every task (Raffel et al. 2020, section 2.4 and
//! appendix D): `mnli hypothesis: … premise: …` in, `entailment` out. A text that is no label counts as wrong.

use super::classify::{CLASS_METRICS, class_files, class_target, read_class, score_among};
use super::regress::{number_files, score_numbers, unrelated};
use super::seq2seq::{TokenLoss, check_trains, lay_out_pair, pair_batch, pair_instances};
use super::*;
use crate::task::Task;
use crate::write;

pub(crate) static TEXT_CLASS: Form = Form { second_text: SecondText::Named, ..class() };
pub(crate) static TEXT_PAIR: Form = Form { second_text: SecondText::Needed, ..class() };
pub(crate) static TEXT_NUMBER: Form = Form { metrics: &["pearson", "spearman"], ..form(&TextToText { numbers: true }) };

const fn class() -> Form {
    Form { fewest_labels: 2, metrics: CLASS_METRICS, ..form(&TextToText { numbers: false }) }
}

const fn form(steps: &'static TextToText) -> Form {
    let (pipeline, class) = ("text2text-generation", "AutoModelForSeq2SeqLM");
    let command = "predict --model DIR --data FILE --out labels";
    Form {
        usual_length: 512,
        reads_whole: true,
        writes: true,
        ..Form::new(Head::Seq2Seq, pipeline, class, command, steps)
    }
}

/// A number that is written where the text is none, as T5's own code has it.
const NO_NUMBER: f64 = -1.0;

#[derive(Debug)]
struct TextToText {
    numbers: bool,
}

impl Steps for TextToText {
    fn target(&self, cells: &Cells<'_>, collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        if self.numbers { cells.number() } else { class_target(cells, collector) }
    }

    fn lay_out_example(&self, with: &LayingOut<'_>, example: &Example) -> Result<Prepared, TextError> {
        let targets: Vec<String> = match &example.target {
            Target::Class(class) => vec![with.task.meaning(with.labels, *class as usize).to_owned()],
            Target::Number(number) => vec![fifths(*number)],
            _ => Vec::new(),
        };
        let Some(source) = source(with.task, &example.input) else { return Ok(Prepared::Plain(Vec::new())) };
        lay_out_pair(with.tokenizer, &source, &targets, with.lengths)
    }

    fn instances(&self, prepared: Prepared, _target: &Target, _labels: usize) -> Vec<Instance> {
        pair_instances(prepared)
    }

    fn digest(&self, _instance: &Instance) -> String {
        "Text".to_owned()
    }

    fn batch(&self, device: &Device, config: &ModelConfig, instances: &[&Instance], number: u32) -> TrainResult<Batch> {
        pair_batch(device, config, instances, number)
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        Ok(Box::new(TokenLoss::new(device, part)?))
    }

    fn label_names(&self, train: &Set) -> Vec<String> {
        if self.numbers { Vec::new() } else { meanings(train) }
    }

    fn reading(&self, recipe: &FineTuneRecipe, _train: &Set, reading: TrainedReading) -> TrainedReading {
        TrainedReading { max_target: Some(recipe.target_length()), ..reading }
    }

    fn note(&self) -> Option<&'static str> {
        Some(
            "It reads `<task> <field>: <text>` for each field in alphabetical order, and writes the label; `henson predict` and \
             `henson eval` lay texts out so and read labels off what is written.",
        )
    }

    fn read_written(&self, set: &Set, _example: &Example, text: String) -> Prediction {
        let text = text.trim();
        if self.numbers {
            let number = text.parse().ok().filter(|number: &f64| number.is_finite());
            return Prediction::Number(number.unwrap_or(NO_NUMBER));
        }
        let labels = 0..set.labels.len();
        let class = labels.into_iter().find(|label| set.task.meaning(&set.labels, *label) == text);
        class.map_or(Prediction::None, |class| Prediction::Class { class: class as u32, scores: Vec::new() })
    }

    fn predict_set(
        &self,
        models: &[henson_infer::Model],
        set: &Set,
        settings: &PredictSettings,
        each: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Prediction>, TaskError> {
        write::predict_set(models, set, settings, each)
    }

    fn check(&self, recipe: &FineTuneRecipe, _model: &Path) -> Result<(), TaskError> {
        check_trains(recipe)
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        if self.numbers {
            return score_numbers(set, predictions);
        }
        let other = set.labels.len() as u32;
        let missing = predictions.iter().filter(|prediction| **prediction == Prediction::None).count();
        let known = predictions.iter().map(|prediction| match prediction {
            Prediction::None => Prediction::Class { class: other, scores: Vec::new() },
            known => known.clone(),
        });
        let known: Vec<Prediction> = known.collect();
        let more: &[&str] = if missing > 0 { &["(no label)"] } else { &[] };
        Ok(Score { missing, ..score_among(set, &known, more)? })
    }

    fn degenerate(&self, _set: &Set, predictions: &[Prediction], score: &Score) -> Option<String> {
        if self.numbers { unrelated(predictions, score) } else { None }
    }

    fn prediction(&self, set: &mut Set, found: &Found) -> Result<Prediction, String> {
        if self.numbers { Ok(Prediction::Number(found.number()?)) } else { read_class(set, found) }
    }

    /// The benchmark's file, where every example has a label: the first one where the model wrote none.
    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        if self.numbers {
            return number_files(set, predictions);
        }
        let known = predictions.iter().map(|prediction| match prediction {
            Prediction::None => Prediction::Class { class: 0, scores: Vec::new() },
            known => known.clone(),
        });
        class_files(set, &known.collect::<Vec<_>>())
    }
}

/// The names of a task's fields in T5's own texts, for the first text and the second.
fn fields(task: &Task) -> [&'static str; 2] {
    match task.name {
        "mnli" | "mnli-mismatched" | "ax" => ["premise", "hypothesis"],
        "qqp" => ["question1", "question2"],
        "qnli" => ["question", "sentence"],
        _ => ["sentence1", "sentence2"],
    }
}

/// What the model reads: the task's name, then its fields in alphabetical order.
fn source(task: &Task, input: &Input) -> Option<String> {
    let name = match task.name {
        "mnli-mismatched" | "ax" => "mnli",
        name => name,
    };
    match input {
        Input::One(text) => Some(format!("{name} sentence: {text}")),
        Input::Pair(first, second) => {
            let [a, b] = fields(task);
            let mut both = [(a, first), (b, second)];
            both.sort_by_key(|(field, _)| *field);
            let [(a, first), (b, second)] = both;
            Some(format!("{name} {a}: {first} {b}: {second}"))
        }
        _ => None,
    }
}

/// A number as the nearest multiple of a fifth, with one decimal; halves to the even one, as numpy rounds.
fn fifths(number: f64) -> String {
    format!("{:.1}", (number * 5.0).round_ties_even() / 5.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_of_t5() {
        let pair = || Input::Pair("It rains.".to_owned(), "It is wet.".to_owned());
        let cases = [
            ("cola", Input::One("It rains.".to_owned()), "cola sentence: It rains."),
            ("sst2", Input::One("fine".to_owned()), "sst2 sentence: fine"),
            ("mnli", pair(), "mnli hypothesis: It is wet. premise: It rains."),
            ("mnli-mismatched", pair(), "mnli hypothesis: It is wet. premise: It rains."),
            ("qnli", pair(), "qnli question: It rains. sentence: It is wet."),
            ("qqp", pair(), "qqp question1: It rains. question2: It is wet."),
            ("mrpc", pair(), "mrpc sentence1: It rains. sentence2: It is wet."),
            ("stsb", pair(), "stsb sentence1: It rains. sentence2: It is wet."),
        ];
        for (name, input, expected) in cases {
            assert_eq!(source(Task::named(name).unwrap(), &input).unwrap(), expected);
        }
        assert_eq!([3.8, 3.75, 0.0, 2.499, 5.0, 4.9].map(fifths), ["3.8", "3.8", "0.0", "2.4", "5.0", "4.8"]);
    }

    #[test]
    fn labels_are_the_words_of_glue() {
        let words = |name: &str| {
            let task = Task::named(name).unwrap();
            let labels: Vec<String> = task.labels.iter().map(|label| (*label).to_owned()).collect();
            (0..labels.len()).map(|i| task.meaning(&labels, i).to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(words("cola"), ["unacceptable", "acceptable"]);
        assert_eq!(words("sst2"), ["negative", "positive"]);
        assert_eq!(words("mrpc"), ["not_equivalent", "equivalent"]);
        assert_eq!(words("qqp"), ["not_duplicate", "duplicate"]);
        assert_eq!(words("mnli"), ["entailment", "neutral", "contradiction"]);
        assert_eq!(words("qnli"), ["entailment", "not_entailment"]);
        assert_eq!(words("rte"), ["entailment", "not_entailment"]);
    }
}
