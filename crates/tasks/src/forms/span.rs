//! A class for marked spans of a text or two: whether a word means the same in two sentences (WiC), whether a pronoun stands for
//! a name (WSC).
//!
//! The baselines of SuperGLUE put a linear classifier on the vectors of `[CLS]` and of the spans, side by side (Wang et al. 2019,
//! section 4.1; for WSC they pool a span by attention and leave `[CLS]` out, here a span is the mean of its tokens for both). Side
//! by side, W·[h₀; h₁; h₂] is W₀h₀ + W₁h₁ + W₂h₂. So the head is that for tokens, with a label for every role and class: a class's
//! logit is the sum over the roles of the mean over their tokens. A saved model is then of a class that `transformers` has.
//!
//! Legend: N examples in a part of a batch, T tokens, R roles (the first token, then each span), C classes.

use henson_data::tables::Column;
use henson_infer::softmax;
use serde_json::Value;

use super::classify::{CLASS_METRICS, class_target, score_classes};
use super::*;
use crate::example::Span;

pub(crate) static SPAN: Form = form();

/// The second span is in a second text.
pub(crate) static SPAN_PAIR: Form = Form { second_text: SecondText::Needed, ..form() };

const fn form() -> Form {
    let (class, command) = ("AutoModelForTokenClassification", "predict --model DIR --data FILE --out PREDICTIONS");
    let form = Form::new(Head::Token { labels: 2 }, "token-classification", class, command, &Spans);
    Form { fewest_labels: 2, reads_whole: true, metrics: CLASS_METRICS, ..form }
}

/// What stands before a class in the label of a role.
const FIRST_TOKEN: &str = "cls:";

#[derive(Debug)]
struct Spans;

impl Steps for Spans {
    fn read(&self, path: &Path, collector: Collector<'_>) -> Result<Set, TaskError> {
        let skip_bad = collector.reading.files.skip_bad;
        let mut set = rows::read(path, collector)?;
        let count = spans_in(&set);
        while let Err(problem) = check_spans(&set, count) {
            if !skip_bad {
                return Err(problem);
            }
            let before = set.examples.len();
            set.examples.retain(|example| spans_of(example) == count);
            set.skipped += before - set.examples.len();
            set.problems.push(problem.to_string());
        }
        Ok(set)
    }

    fn input(&self, cells: &Cells<'_>) -> Result<Input, TaskError> {
        let (first, second) = (cells.first.clone(), cells.second_text()?);
        let spans = find_spans(cells, &first, second.as_deref())?;
        Ok(Input::Marked { first, second, spans })
    }

    fn target(&self, cells: &Cells<'_>, collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        class_target(cells, collector)
    }

    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::Marked { first, second, spans } = input else { return Ok(Prepared::Plain(Vec::new())) };
        let (template, first) = (tokenizer.template(), tokenizer.encode(first)?);
        let features = match second {
            None => template.single(&first, lengths.most)?,
            Some(second) => template.pair(&first, &tokenizer.encode(second)?, lengths.most)?,
        };
        // The classification token, which is the last one in some templates.
        let cls = tokenizer.special().cls.as_ref().map(|cls| cls.id);
        let whole = features.ids.iter().position(|id| Some(*id) == cls).unwrap_or(0) as u32;
        let positions = |span: &Span| -> Vec<u32> {
            let text = if span.in_second { features.second.clone() } else { Some(features.first.clone()) };
            let shows = |position: &usize| {
                features.offsets[*position].is_some_and(|(start, end)| start < span.bytes.end && span.bytes.start < end)
            };
            let found: Vec<u32> = text.unwrap_or(0..0).filter(shows).map(|position| position as u32).collect();
            // Of a span that was cut off, or that no token shows, there is no vector but that of the whole.
            if found.is_empty() { vec![whole] } else { found }
        };
        let roles = std::iter::once(vec![whole]).chain(spans.iter().map(positions)).collect();
        Ok(Prepared::Marked(features, roles))
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let (Prepared::Marked(_, roles), Target::Class(class)) = (&prepared, target) else { return Vec::new() };
        let spans = roles.clone();
        let mut instances = prepared.apart(|_| (vec![Some(*class)], Vec::new()));
        instances.iter_mut().for_each(|instance| instance.spans.clone_from(&spans));
        instances
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Spans({}, {:?})", joined(&instance.labels), instance.spans)
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        Ok(Box::new(SpanLoss::new(device, part)?))
    }

    fn class_weights(&self, train: &Set) -> Option<Vec<f32>> {
        Some(balanced(&train.label_counts()))
    }

    fn check_data(&self, train: &Set, dev: Option<&Set>) -> Result<(), TaskError> {
        let count = spans_in(train);
        [Some(train), dev].into_iter().flatten().try_for_each(|set| check_spans(set, count))
    }

    /// A label for every role and class.
    fn label_names(&self, train: &Set) -> Vec<String> {
        let roles = std::iter::once(FIRST_TOKEN.to_owned()).chain((1..=spans_in(train)).map(|i| format!("span{i}:")));
        let classes = meanings(train);
        roles.flat_map(|role| classes.iter().map(move |class| format!("{role}{class}")).collect::<Vec<_>>()).collect()
    }

    fn class_names(&self, names: Vec<String>) -> Vec<String> {
        let classes: Vec<String> =
            names.iter().filter_map(|name| name.strip_prefix(FIRST_TOKEN)).map(str::to_owned).collect();
        if classes.is_empty() { names } else { classes }
    }

    fn reading(&self, _recipe: &FineTuneRecipe, train: &Set, reading: TrainedReading) -> TrainedReading {
        TrainedReading { spans: Some(spans_in(train)), ..reading }
    }

    fn fits(&self, reading: Option<TrainedReading>, set: &Set) -> Result<(), String> {
        let (has, needs) = (reading.and_then(|reading| reading.spans), spans_in(set));
        match has {
            Some(has) if has == needs => Ok(()),
            Some(has) => Err(format!("of {has} marked spans, and the examples have {needs}")),
            None => Err("of words, which knows no marked spans (config.json has no henson_reading.spans)".to_owned()),
        }
    }

    fn note(&self) -> Option<&'static str> {
        Some(
            "Labels are pairs of a role and a class: `cls` for the first token, `span1` for the first marked span, and so on. The \
             logit of a class is the sum over the roles of the mean of `role:class` over the tokens of the role.",
        )
    }

    fn scores(&self, _problem: Option<Problem>, prepared: &Prepared, logits: &[Vec<f32>]) -> Scores {
        let (Prepared::Marked(sequence, roles), [logits]) = (prepared, logits) else { return Vec::new() };
        let columns = logits.len() / sequence.len().max(1);
        let classes = columns / roles.len().max(1);
        let mut sums = vec![0.0; classes];
        for (role, positions) in roles.iter().enumerate() {
            for position in positions {
                let start = *position as usize * columns + role * classes;
                for (sum, logit) in sums.iter_mut().zip(&logits[start..]) {
                    *sum += logit / positions.len() as f32;
                }
            }
        }
        vec![softmax(&sums)]
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        score_classes(set, predictions)
    }

    fn degenerate(&self, set: &Set, _predictions: &[Prediction], score: &Score) -> Option<String> {
        super::classify::below_majority(set, score)
    }

    fn prediction(&self, set: &mut Set, found: &Found) -> Result<Prediction, String> {
        super::classify::read_class(set, found)
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        super::classify::class_files(set, predictions)
    }
}

/// Spans of each example; those of a set have as many.
fn spans_in(set: &Set) -> usize {
    set.examples.first().map_or(0, spans_of)
}

fn spans_of(example: &Example) -> usize {
    match &example.input {
        Input::Marked { spans, .. } => spans.len(),
        _ => 0,
    }
}

/// Refuses a set whose examples have another number of spans.
fn check_spans(set: &Set, count: usize) -> Result<(), TaskError> {
    match set.examples.iter().find(|example| spans_of(example) != count) {
        None => Ok(()),
        Some(other) => {
            let problem = format!("it has {} marked spans, while others have {count}", spans_of(other));
            Err(TaskError::row(&set.path, other.place.clone(), problem))
        }
    }
}

/// What a part of a batch is held against: where the tokens of each role stand, and the classes.
struct SpanLoss {
    /// Rows of the logits as (T·R)×C.
    rows: Tensor,
    /// Which of them belong together: N·R sequences.
    layout: Layout,
    /// For each role, where its N means stand.
    roles: Vec<Tensor>,
    targets: Targets,
}

impl SpanLoss {
    fn new(device: &Device, part: &Part<'_>) -> TrainResult<Self> {
        let roles = part.instances.first().map_or(1, |instance| instance.spans.len()).max(1);
        let (mut rows, mut lengths, mut start) = (Vec::new(), Vec::new(), 0);
        for instance in part.instances {
            for (role, positions) in instance.spans.iter().enumerate() {
                rows.extend(positions.iter().map(|position| (start + position) * roles as u32 + role as u32));
                lengths.push(positions.len());
            }
            start += instance.tokens() as u32;
        }
        let layout = Layout::new(device, &lengths, 0)?;
        // What fills the rows up on a GPU, if anything.
        rows.resize(layout.tokens(), Device::NOWHERE);
        let count = part.instances.len();
        let of_role = |role: usize| {
            let places: Vec<u32> = (0..count).map(|i| (i * roles + role) as u32).collect();
            Tensor::from_slice(device, [count], &places)
        };
        let (classes, weights) = part.labels();
        Ok(Self {
            rows: Tensor::from_slice(device, [rows.len()], &rows)?,
            layout,
            roles: (0..roles).map(of_role).collect::<Result<_, _>>()?,
            targets: Targets::Classes(
                Tensor::from_slice(device, [count], &classes)?,
                Some(Tensor::from_slice(device, [count], &weights)?),
            ),
        })
    }
}

impl Loss for SpanLoss {
    fn of(&self, model: &Model, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> TrainResult<Vec<Tensor>> {
        let logits = model.logits_of(pass, last, layout, None)?;
        let (tokens, columns, roles) = (logits.tensor().rows(), logits.tensor().columns(), self.roles.len());
        let by_role = logits.reshape([tokens * roles, columns / roles])?;
        let marked = pass.gather(&by_role, &self.rows)?;
        let means = pass.means(&marked, &self.layout)?;
        let mut sum: Option<Var> = None;
        for role in &self.roles {
            let own = pass.gather(&means, role)?;
            sum = Some(match sum {
                None => own,
                Some(sum) => pass.add_residual(own, &sum, layout, (0.0, 0))?,
            });
        }
        // There is always a first token.
        let logits = sum.unwrap_or(means);
        Ok(vec![self.targets.loss(pass, logits, layout, 1.0)?])
    }
}

/// The spans of a row, written in one of three ways: `start1`, `end1`, … in characters (WiC); `span1_index` in words and
/// `span1_text`, … (WSC, in the object `target`); `span1`, … as a list of two numbers of characters. The second is in the second
/// text, where there is one.
fn find_spans(cells: &Cells<'_>, first: &str, second: Option<&str>) -> Result<Vec<Span>, TaskError> {
    let mut spans = Vec::new();
    for number in 1..=2 {
        let in_second = number == 2 && second.is_some();
        let text = second.filter(|_| in_second).unwrap_or(first);
        let found = span(cells, text, number).map_err(|problem| cells.wrong(problem))?;
        spans.extend(found.map(|bytes| Span { in_second, bytes }));
        if spans.len() < number {
            break;
        }
    }
    match spans.is_empty() {
        false => Ok(spans),
        true => {
            let found = listed(&cells.row.names());
            let expected =
                "expected \"start1\" and \"end1\", \"target\" with \"span1_index\" and \"span1_text\", or \"span1\"";
            Err(cells.wrong(format!("no key for the spans: {expected}, found {found}")))
        }
    }
}

/// The bytes of one span, where the row has it.
fn span(cells: &Cells<'_>, text: &str, number: usize) -> Result<Option<Range<usize>>, String> {
    let cell = |name: String| {
        let value = cells.row.get(&Column::Name(name.clone()));
        let nested = || cells.row.get(&Column::Name("target".to_owned()))?.get(&name);
        value.or_else(nested).filter(|value| !value.is_null()).map(|value| (name.clone(), value))
    };
    let [start, end, index, written, list] =
        [("start", ""), ("end", ""), ("span", "_index"), ("span", "_text"), ("span", "")]
            .map(|(before, after)| cell(format!("{before}{number}{after}")));
    if let (Some(start), Some(end)) = (&start, &end) {
        return characters(text, (&start.0, count(start)?), (&end.0, count(end)?)).map(Some);
    }
    if let (Some(index), Some((name, value))) = (&index, &written) {
        let span = super::text(value).map_err(|problem| format!("{name:?}: {problem}"))?.unwrap_or_default();
        return words(text, (&index.0, count(index)?), (name, &span)).map(Some);
    }
    let Some((name, value)) = list else { return Ok(None) };
    match value.as_array().map(Vec::as_slice) {
        Some([start, end]) => {
            let number = |value| count(&(name.clone(), value));
            characters(text, (&name, number(start)?), (&name, number(end)?)).map(Some)
        }
        _ => Err(format!("{name:?}: expected a list of the first character and the one after the last, found {value}")),
    }
}

/// A whole number.
fn count((name, value): &(String, &Value)) -> Result<usize, String> {
    let written = super::text(value).map_err(|problem| format!("{name:?}: {problem}"))?.unwrap_or_default();
    written.trim().parse().map_err(|_| format!("{name:?}: expected a whole number from 0, found {written:?}"))
}

/// The bytes of some characters.
fn characters(text: &str, start: (&str, usize), end: (&str, usize)) -> Result<Range<usize>, String> {
    let length = text.chars().count();
    if start.1 >= end.1 || end.1 > length {
        let ((start, from), (end, to)) = (start, end);
        return Err(format!(
            "{start:?} is {from} and {end:?} is {to}: expected a part of the {length} characters of the text"
        ));
    }
    let byte = |number: usize| text.char_indices().nth(number).map_or(text.len(), |(byte, _)| byte);
    Ok(byte(start.1)..byte(end.1))
}

/// The bytes of a span that begins with a word, by its number, and is written out as well. Numbers of the official files do
/// not always fit, neither do capitals: the occurrence nearest to the word counts.
fn words(text: &str, (index_name, index): (&str, usize), (name, span): (&str, &str)) -> Result<Range<usize>, String> {
    let starts: Vec<usize> =
        text.split_whitespace().map(|word| word.as_ptr() as usize - text.as_ptr() as usize).collect();
    let Some(wanted) = starts.get(index) else {
        return Err(format!("{index_name:?} is {index}: the text has {} words", starts.len()));
    };
    let trimmed = [span.trim(), span.trim().trim_matches(|c: char| c.is_ascii_punctuation())];
    let found = trimmed.iter().filter(|span| !span.is_empty()).find_map(|span| {
        let places =
            text.char_indices().filter_map(|(start, _)| Some(start..start + begins_with(&text[start..], span)?));
        places.filter(|place| is_whole(text, place)).min_by_key(|place| place.start.abs_diff(*wanted))
    });
    found.ok_or_else(|| format!("{name:?}: {span:?} does not occur in the text"))
}

/// The bytes of a beginning, whatever its capitals.
fn begins_with(text: &str, beginning: &str) -> Option<usize> {
    let mut rest = text.chars();
    for c in beginning.chars() {
        if !rest.next()?.to_lowercase().eq(c.to_lowercase()) {
            return None;
        }
    }
    Some(text.len() - rest.as_str().len())
}

/// Whether a part of a text begins and ends where words do.
fn is_whole(text: &str, part: &Range<usize>) -> bool {
    let inside =
        |a: Option<char>, b: Option<char>| a.is_some_and(char::is_alphanumeric) && b.is_some_and(char::is_alphanumeric);
    let (before, within, after) = (&text[..part.start], &text[part.clone()], &text[part.end..]);
    !inside(before.chars().next_back(), within.chars().next())
        && !inside(within.chars().next_back(), after.chars().next())
}
