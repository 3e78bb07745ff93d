//! The curves as the page's script gets them: each with at most [`POINTS`] points, which keep the highs and lows.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{METRICS, Run, in_order, words};

/// The most points of a curve.
pub(super) const POINTS: usize = 1500;

/// The most points of a curve's mean, which the script smooths.
const MEANS: usize = 500;

/// Beyond this a number is shown like one that is not finite: no axis could hold it beside others.
const LARGEST: f64 = 1e30;

/// Everything that the script draws.
#[derive(Serialize)]
pub(super) struct Data {
    pub(super) charts: Vec<Chart>,
    pub(super) runs: Vec<RunData>,
}

/// A chart, for all runs.
#[derive(Serialize)]
pub(super) struct Chart {
    pub(super) title: String,
    /// Whose positions it uses: `train` or `eval`.
    pub(super) group: &'static str,
    pub(super) series: String,
    /// Whether it is noisy, so that it is smoothed.
    smooth: bool,
    /// Whether its scale is logarithmic at first.
    log: bool,
    percent: bool,
}

#[derive(Serialize)]
pub(super) struct RunData {
    name: String,
    pub(super) train: Group,
    pub(super) eval: Group,
    /// Where later phases begin: step, tokens, seconds.
    phases: Vec<Position>,
}

/// Curves over the same positions.
#[derive(Serialize)]
pub(super) struct Group {
    step: Vec<u64>,
    tokens: Vec<u64>,
    seconds: Vec<f64>,
    pub(super) series: BTreeMap<String, Series>,
}

#[derive(Serialize)]
pub(super) struct Series {
    #[serde(flatten)]
    pub(super) points: Points,
    /// Means of neighbours, where `points` are not all that there were: smoothing highs and lows would mislead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mean: Option<Points>,
}

#[derive(Serialize)]
pub(super) struct Points {
    /// The rows of the positions; left out where they are all.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<Vec<usize>>,
    /// `null` where a number is not finite.
    pub(super) y: Vec<Option<f64>>,
}

#[derive(Clone, Copy, Serialize)]
struct Position {
    step: u64,
    tokens: u64,
    seconds: f64,
}

/// A curve before it is thinned: rows of the positions, and values.
type Column = Vec<(usize, f64)>;

impl Data {
    pub(super) fn new(runs: &[Run]) -> Self {
        let (mut names, mut parts) = (BTreeMap::new(), BTreeSet::new());
        let mut data = Vec::new();
        for run in runs {
            let evals = run.evals();
            parts.extend(run.train().into_iter().flat_map(|line| line.losses.iter().map(|(name, _)| name)));
            names.extend(evals.iter().flat_map(|eval| eval.metrics.keys().map(|name| (name.clone(), ()))));
            data.push(RunData::new(run));
        }
        let mut charts = Vec::new();
        let mut train = |title: &str, series: &str, smooth, log| {
            if data.iter().any(|run| run.train.series.contains_key(series)) {
                let (title, series) = (title.to_owned(), series.to_owned());
                charts.push(Chart { title, group: "train", series, smooth, log, percent: false });
            }
        };
        train("Training loss", "loss", true, false);
        parts.into_iter().take(METRICS).for_each(|name| train(&title(&words(name)), name, true, false));
        train("Learning rate", "learning_rate", false, false);
        train("Gradient norm", "gradient_norm", true, true);
        train("Tokens per second", "tokens_per_s", true, false);
        let has_loss = names.contains_key("loss");
        // Perplexity is the loss on another scale.
        let shown = in_order(&names).filter(|(name, ())| !(has_loss && *name == "perplexity")).take(METRICS);
        let held_out = shown.map(|(name, ())| Chart {
            title: format!("Held-out {}", words(name)),
            group: "eval",
            series: name.clone(),
            smooth: false,
            log: false,
            percent: name.contains("accuracy"),
        });
        // Beside the training loss, which is the first.
        let held_out: Vec<Chart> = held_out.collect();
        let place = charts.len().min(1);
        charts.splice(place..place, held_out);
        for run in &mut data {
            for (group, series) in [("train", &mut run.train.series), ("eval", &mut run.eval.series)] {
                series.retain(|name, _| charts.iter().any(|chart| chart.group == group && chart.series == *name));
            }
        }
        Self { charts, runs: data }
    }
}

impl RunData {
    fn new(run: &Run) -> Self {
        let lines = run.train();
        let (mut tokens, mut seconds) = (0, 0.0_f64);
        // A position never goes back, whatever the log says: the script searches by bisection.
        let positions: Vec<Position> = lines
            .iter()
            .map(|line| {
                tokens = tokens.max(line.tokens);
                seconds = if line.seconds < LARGEST { seconds.max(line.seconds) } else { seconds };
                Position { step: line.step, tokens, seconds }
            })
            .collect();
        let mut columns: BTreeMap<String, Column> = BTreeMap::new();
        for (row, line) in lines.iter().enumerate() {
            // A single part is the loss itself.
            let is_shown = |name: &str| line.losses.len() > 1 || line.losses.iter().all(|(part, _)| part != name);
            for (name, number) in line.numbers().filter(|(name, _)| is_shown(name)) {
                match columns.get_mut(name) {
                    Some(column) => column.push((row, number)),
                    None => drop(columns.insert(name.to_owned(), vec![(row, number)])),
                }
            }
        }
        let phases = lines.windows(2).zip(&positions);
        let phases = phases.filter(|(pair, _)| pair[0].phase != pair[1].phase).map(|(_, position)| *position).collect();

        let evals = run.evals();
        let mut eval_columns: BTreeMap<String, Column> = BTreeMap::new();
        for (row, eval) in evals.iter().enumerate() {
            for (name, number) in &eval.metrics {
                eval_columns.entry(name.clone()).or_default().push((row, *number));
            }
        }
        let eval_positions: Vec<Position> = evals.iter().map(|eval| position_of(eval.step, &positions)).collect();
        Self {
            name: run.name.clone(),
            train: Group::new(&positions, &columns),
            eval: Group::new(&eval_positions, &eval_columns),
            phases,
        }
    }
}

impl Group {
    /// Thins each curve for itself, then keeps the positions that any of them needs.
    fn new(positions: &[Position], columns: &BTreeMap<String, Column>) -> Self {
        let mut used = BTreeSet::new();
        let mut thinned = Vec::new();
        for (name, column) in columns {
            let points = thin(column, POINTS);
            let mean = (points.len() < column.len()).then(|| means(column, MEANS));
            used.extend(points.iter().chain(mean.iter().flatten()).map(|(row, _)| *row));
            thinned.push((name, points, mean));
        }
        let used: Vec<usize> = used.into_iter().collect();
        let points = |column: Column| {
            let rows: Vec<usize> = column.iter().filter_map(|(row, _)| used.binary_search(row).ok()).collect();
            let y = column.iter().map(|(_, value)| rounded(*value)).collect();
            Points { rows: (rows.len() < used.len()).then_some(rows), y }
        };
        let series = thinned.into_iter();
        let series =
            series.map(|(name, all, mean)| (name.clone(), Series { points: points(all), mean: mean.map(points) }));
        Self {
            series: series.collect(),
            step: used.iter().map(|row| positions[*row].step).collect(),
            tokens: used.iter().map(|row| positions[*row].tokens).collect(),
            seconds: used.iter().map(|row| (positions[*row].seconds * 10.0).round() / 10.0).collect(),
        }
    }
}

/// With a capital letter.
fn title(words: &str) -> String {
    let (first, rest) = words.split_at(words.chars().next().map_or(0, char::len_utf8));
    first.to_uppercase() + rest
}

/// At most `most` of the points (at least 5): the first, the last, and from equal ranges the lowest, the highest and,
/// where a curve has numbers that are not finite, the first of these.
fn thin(points: &[(usize, f64)], most: usize) -> Column {
    if points.len() <= most {
        return points.to_vec();
    }
    let per_range = if points.iter().all(|(_, y)| y.is_finite()) { 2 } else { 3 };
    let ranges = (most - 2) / per_range;
    let inner = &points[1..points.len() - 1];
    let mut kept = BTreeSet::from([0, points.len() - 1]);
    for range in 0..ranges {
        let (from, to) = (range * inner.len() / ranges, (range + 1) * inner.len() / ranges);
        let finite = || (from..to).filter(|i| inner[*i].1.is_finite());
        let by_value = |a: &usize, b: &usize| inner[*a].1.total_cmp(&inner[*b].1);
        let lost = (from..to).find(|i| !inner[*i].1.is_finite());
        kept.extend([finite().min_by(by_value), finite().max_by(by_value), lost].into_iter().flatten().map(|i| i + 1));
    }
    kept.into_iter().map(|i| points[i]).collect()
}

/// The means of `most` equal ranges, at the middle of each. Numbers that are not finite are left out.
fn means(points: &[(usize, f64)], most: usize) -> Column {
    let ranges = (0..most).map(|i| &points[i * points.len() / most..(i + 1) * points.len() / most]);
    let mean = |range: &[(usize, f64)]| {
        let (sum, n) =
            range.iter().filter(|(_, y)| y.is_finite()).fold((0.0, 0.0), |(sum, n), (_, y)| (sum + y, n + 1.0));
        range.get(range.len() / 2).map(|(row, _)| (*row, sum / n))
    };
    ranges.filter_map(mean).collect()
}

/// Where a step lies: on a line between its neighbours in the log.
fn position_of(step: u64, positions: &[Position]) -> Position {
    let after = positions.partition_point(|position| position.step < step);
    let left = after.checked_sub(1).map_or(Position { step: 0, tokens: 0, seconds: 0.0 }, |i| positions[i]);
    let right = positions.get(after).copied().unwrap_or(left);
    let share = match right.step.saturating_sub(left.step) {
        0 => 0.0,
        width => (step - left.step) as f64 / width as f64,
    };
    Position {
        step,
        tokens: left.tokens + ((right.tokens - left.tokens) as f64 * share) as u64,
        seconds: left.seconds + (right.seconds - left.seconds) * share,
    }
}

/// Six digits that count, which is more than a screen shows.
fn rounded(value: f64) -> Option<f64> {
    match value.abs() {
        size if size < 1.0 / LARGEST => Some(0.0),
        size if size < LARGEST => format!("{value:.5e}").parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noisy(n: usize) -> Column {
        (0..n).map(|i| (i, (i as f64 * 0.37).sin() + 100.0 / (1.0 + i as f64))).collect()
    }

    #[test]
    fn thinning_keeps_ends_highs_and_lows() {
        for n in [0, 1, 2, 5, 10, 11, 12, 1499, 1500, 1501, 20_000] {
            for most in [5, 10, 1500] {
                let mut points = noisy(n);
                if n > 1000 {
                    points[777].1 = -50.0;
                    points[778].1 = 50_000.0;
                }
                let kept = thin(&points, most);
                assert!(kept.len() <= most && kept.len() <= n && (n > most || kept == points), "{n} {most}");
                assert!(kept.is_sorted_by(|a, b| a.0 < b.0) && kept.iter().all(|point| points.contains(point)));
                assert_eq!((kept.first(), kept.last()), (points.first(), points.last()));
                let low = |points: &Column| points.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
                let high = |points: &Column| points.iter().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
                assert_eq!((low(&kept), high(&kept)), (low(&points), high(&points)), "{n} {most}");
            }
        }
    }

    #[test]
    fn thinning_keeps_what_is_not_finite() {
        let mut points = noisy(10_000);
        points[5000].1 = f64::NAN;
        points[5001].1 = f64::INFINITY;
        let kept = thin(&points, POINTS);
        assert!(kept.len() <= POINTS);
        assert!(kept.iter().any(|(row, y)| *row == 5000 && y.is_nan()), "the first of a range is enough");
        let all_lost: Column = (0..10_000).map(|row| (row, f64::NAN)).collect();
        assert!((400..=POINTS).contains(&thin(&all_lost, POINTS).len()));
    }

    #[test]
    fn means_are_means() {
        let points: Column = (0..1000).map(|row| (row, if row % 2 == 0 { 1.0 } else { 3.0 })).collect();
        let all = means(&points, 100);
        assert_eq!(all.len(), 100);
        assert!(all.iter().all(|(_, y)| *y == 2.0) && all.is_sorted_by(|a, b| a.0 < b.0));
        let lost: Column = (0..10).map(|row| (row, f64::NAN)).collect();
        assert!(means(&lost, 2).iter().all(|(_, y)| y.is_nan()), "a range without any number has no mean");
    }

    #[test]
    fn steps_between_lines_lie_between_them() {
        let positions =
            [(10, 100, 1.0), (20, 300, 2.0)].map(|(step, tokens, seconds)| Position { step, tokens, seconds });
        for (step, tokens, seconds) in [(0, 0, 0.0), (5, 50, 0.5), (10, 100, 1.0), (15, 200, 1.5), (99, 300, 2.0)] {
            let position = position_of(step, &positions);
            assert_eq!((position.step, position.tokens, position.seconds), (step, tokens, seconds));
        }
        assert_eq!(position_of(7, &[]).tokens, 0);
    }
}
