//! The page's HTML: everything that needs no script, so that it can be read without one. The script only draws the
//! curves.

use std::collections::BTreeMap;
use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::html::Text;
use super::numbers::{count, digits, duration, metric, short};
use super::series::{Chart, Data};
use super::{MARK, METRICS, Run, Summary, by_step, flat, in_order, words};
use crate::metrics::{Line, Note, Prediction, Samples};

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// Runs have this many colours; later ones are dashed.
const COLOURS: usize = 8;

/// The most columns of samples, rows of tables and notes. The log has them all.
const SAMPLE_COLUMNS: usize = 7;
const TABLE_ROWS: usize = 40;
const NOTES: usize = 200;

/// A line of HTML. Writing to a string cannot fail.
macro_rules! line {
    ($out:expr, $($argument:tt)*) => {{
        let _ = writeln!($out, $($argument)*);
    }};
}

/// The page for one run, or for several side by side.
pub fn render(runs: &[Run]) -> String {
    let summaries: Vec<Summary> = runs.iter().map(Run::summary).collect();
    let data = Data::new(runs);
    let title = match runs {
        [] => "No runs".to_owned(),
        [run] => run.name.clone(),
        runs => format!("{} runs compared", runs.len()),
    };
    let mut sections = String::new();
    if !runs.is_empty() {
        summary(&mut sections, &summaries);
        curves(&mut sections, &data, &summaries);
        samples(&mut sections, runs);
        // Tables of several runs need the whole width.
        line!(sections, "<div{}>", if runs.len() == 1 { " class=\"columns\"" } else { "" });
        recipes(&mut sections, runs);
        facts(&mut sections, "model", "Model", runs, |run| &run.facts);
        facts(&mut sections, "results", "Further results", runs, |run| &run.results);
        confusions(&mut sections, runs);
        notes(&mut sections, runs);
        numbers(&mut sections, runs);
        line!(sections, "</div>");
    }
    // The text of a data block ends at `</script`, and goes astray at `<!--`: without any `<` it does neither.
    let json = serde_json::to_string(&data).unwrap_or_default().replace('<', "\\u003c");
    assemble(&title, &header(&title, runs), &sections, &json, SCRIPT)
}

/// A whole page of its parts: HTML, a block of JSON, and the script that draws it.
pub(super) fn assemble(title: &str, header: &str, sections: &str, json: &str, script: &str) -> String {
    fill(TEMPLATE, |name| match name {
        "mark" => MARK.to_owned(),
        "hash" => hash(script),
        "title" => format!("{} · henson", Text(title)),
        "style" => STYLE.to_owned(),
        "header" => header.to_owned(),
        "sections" => sections.to_owned(),
        "version" => env!("CARGO_PKG_VERSION").to_owned(),
        "data" => json.to_owned(),
        "script" => script.to_owned(),
        other => unreachable!("the template names {other}"),
    })
}

/// Puts values in the place of `{{name}}`, in one pass: what a value contains is never looked at.
fn fill(template: &str, mut value: impl FnMut(&str) -> String) -> String {
    let mut parts = template.split("{{");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("}}").unwrap_or((part, ""));
        out.push_str(&value(name));
        out.push_str(rest);
    }
    out
}

/// The name of a script under which a content security policy allows it: `sha256-` and the base64 of its hash.
fn hash(script: &str) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::from("sha256-");
    for three in Sha256::digest(script).chunks(3) {
        let bits = three.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let letter = char::from(LETTERS[(bits >> (18 - 6 * i) & 63) as usize]);
            out.push(if i <= three.len() { letter } else { '=' });
        }
    }
    out
}

fn header(title: &str, runs: &[Run]) -> String {
    let mut out = String::new();
    line!(out, "<p class=\"brand\">henson <span>training report</span></p>");
    line!(out, "<h1 dir=\"auto\">{}</h1>", Text(title));
    if let [run] = runs {
        let fact = |name: &str| run.facts.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str());
        let parts = [
            fact("architecture").map(|value| Text(value).to_string()),
            fact("layers").map(|value| format!("{} layers", Text(value))),
            fact("hidden size").map(|value| format!("hidden size {}", Text(value))),
            fact("parameters").map(|value| format!("{} parameters", Text(value))),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        if !parts.is_empty() {
            line!(out, "<p class=\"lead\">{}</p>", parts.join(" · "));
        }
    }
    out
}

/// The headline: figures of one run, or a table with one row a run.
fn summary(out: &mut String, summaries: &[Summary]) {
    let class = if summaries.len() == 1 { " class=\"unseen\"" } else { "" };
    line!(out, "<section id=\"summary\" aria-labelledby=\"summary-title\">");
    line!(out, "<h2 id=\"summary-title\"{class}>Results</h2>");
    match summaries {
        [summary] if summary.is_empty() => line!(out, "<p class=\"empty\">This run has logged nothing yet.</p>"),
        [summary] => {
            let (metrics, rest): (Vec<_>, Vec<_>) =
                summary.figures().into_iter().partition(|figure| figure.lower_is_better.is_some());
            for (class, figures) in [("cards", metrics), ("strip", rest)] {
                line!(out, "<dl class=\"{class}\">");
                for figure in figures {
                    let (label, text) = (Text(&figure.label), Text(&figure.text));
                    let best = figure.best.map(|(best, step)| {
                        format!("<dd class=\"best\">best {} at step {}</dd>", Text(&best), count(step))
                    });
                    line!(out, "<div><dt>{label}</dt><dd>{text}</dd>{}</div>", best.unwrap_or_default());
                }
                line!(out, "</dl>");
            }
        }
        summaries => comparison(out, summaries),
    }
    line!(out, "</section>");
}

fn comparison(out: &mut String, summaries: &[Summary]) {
    let figures: Vec<_> = summaries.iter().map(Summary::figures).collect();
    let mut labels: Vec<&str> = Vec::new();
    for figure in figures.iter().flatten() {
        if !labels.contains(&figure.label.as_str()) {
            labels.push(&figure.label);
        }
    }
    begin_table(out, "Results of all runs");
    line!(out, "<thead><tr><th scope=\"col\">run</th>");
    labels.iter().for_each(|label| line!(out, "<th scope=\"col\" class=\"number\">{}</th>", Text(label)));
    line!(out, "</tr></thead>\n<tbody>");
    let find = |run: usize, label: &str| figures[run].iter().find(|figure| figure.label == label);
    for (i, summary) in summaries.iter().enumerate() {
        line!(out, "<tr>{}", run_cell("row", "", i, &summary.name));
        for label in &labels {
            let Some(figure) = find(i, label) else {
                line!(out, "<td class=\"number\">–</td>");
                continue;
            };
            let all = (0..summaries.len()).filter_map(|run| find(run, label)).map(|figure| figure.value);
            let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
            let best = match figure.lower_is_better {
                Some(lower) => low < high && figure.value == if lower { low } else { high },
                None => false,
            };
            let earlier = figure.best.as_ref().map(|(best, _)| format!("<small>best {}</small>", Text(best)));
            let text = Text(&figure.text);
            let text = if best { format!("<strong title=\"the best\">{text}</strong>") } else { text.to_string() };
            line!(out, "<td class=\"number\">{text}{}</td>", earlier.unwrap_or_default());
        }
        line!(out, "</tr>");
    }
    line!(out, "</tbody>");
    end_table(out);
}

/// The frames that the script draws into. Each has its title, and what it shows in words.
fn curves(out: &mut String, data: &Data, summaries: &[Summary]) {
    if data.charts.is_empty() {
        return;
    }
    line!(out, "<section id=\"curves\" aria-labelledby=\"curves-title\">");
    line!(out, "<h2 id=\"curves-title\">Curves</h2>");
    line!(
        out,
        "<noscript><p class=\"empty\">The curves are drawn by a script, which does not run here. \
        <a href=\"#numbers\">The numbers</a> are all on this page.</p></noscript>"
    );
    line!(out, "<div class=\"toolbar\" hidden>");
    line!(out, "<fieldset class=\"choice\"><legend>Across</legend>");
    for (axis, label) in [("step", "steps"), ("tokens", "tokens"), ("seconds", "time")] {
        let checked = if axis == "step" { " checked" } else { "" };
        line!(out, "<label><input type=\"radio\" name=\"axis\" value=\"{axis}\"{checked}><span>{label}</span></label>");
    }
    line!(out, "</fieldset>");
    line!(
        out,
        "<label class=\"slider\">Smoothing \
        <input type=\"range\" id=\"smoothing\" min=\"0\" max=\"100\" value=\"40\"></label>"
    );
    line!(out, "<button type=\"button\" id=\"whole\" hidden>Show all</button>");
    if summaries.len() > 1 {
        line!(out, "<div class=\"legend\" role=\"group\" aria-label=\"Runs to show\">");
        for (i, summary) in summaries.iter().enumerate() {
            let name = Text(&summary.name);
            line!(
                out,
                "<button type=\"button\" data-run=\"{i}\" aria-pressed=\"true\" title=\"{name}\">{}\
                 <span dir=\"auto\">{name}</span></button>",
                swatch(i)
            );
        }
        line!(out, "</div>");
    }
    line!(out, "</div>\n<div class=\"charts\">");
    for (i, chart) in data.charts.iter().enumerate() {
        let words = describe(chart, data, summaries);
        line!(
            out,
            "<figure data-chart=\"{i}\"><figcaption><h3 id=\"chart-{i}\">{}</h3></figcaption>",
            Text(&chart.title)
        );
        line!(out, "<div class=\"plot\"></div><p class=\"unseen\" id=\"words-{i}\">{}</p></figure>", Text(&words));
    }
    line!(out, "</div>");
    line!(
        out,
        "<p class=\"hint\" hidden>Drag across a chart to look closer; a double click shows all again. With the \
         keyboard: Tab to a chart, then ← and → read its values.</p>"
    );
    line!(out, "<p class=\"unseen\" id=\"spoken\" aria-live=\"polite\"></p>\n</section>");
}

/// A chart in words.
fn describe(chart: &Chart, data: &Data, summaries: &[Summary]) -> String {
    let mut words = format!("{}.", chart.title);
    for (run, summary) in data.runs.iter().zip(summaries) {
        let group = if chart.group == "train" { &run.train } else { &run.eval };
        let Some(series) = group.series.get(&chart.series) else { continue };
        let y: Vec<f64> = series.points.y.iter().flatten().copied().collect();
        let lost = series.points.y.len() - y.len();
        let (Some(first), Some(last)) = (y.first(), y.last()) else { continue };
        let low = y.iter().copied().fold(f64::INFINITY, f64::min);
        let high = y.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let [first, last, low, high] = [*first, *last, low, high].map(|value| metric(&chart.series, value));
        let _ = write!(words, " {}: from {first} to {last}, lowest {low}, highest {high}", summary.name);
        words.push_str(if lost > 0 { ", with values that are not finite." } else { "." });
    }
    words
}

/// What each run fills into its texts, over time.
fn samples(out: &mut String, runs: &[Run]) {
    let of = |run: &Run| -> Vec<Samples> {
        let lines = run.lines.iter().filter_map(|line| if let Line::Samples(line) = line { Some(line) } else { None });
        by_step(lines, |line| line.step).into_iter().cloned().collect()
    };
    let all: Vec<Vec<Samples>> = runs.iter().map(of).collect();
    if all.iter().all(Vec::is_empty) {
        return;
    }
    line!(out, "<section id=\"samples\" aria-labelledby=\"samples-title\">");
    line!(out, "<h2 id=\"samples-title\">What it fills in</h2>");
    if runs.len() > 1 {
        // Side by side as they are now; the way there is one step further.
        let columns: Vec<(String, &Samples)> = runs
            .iter()
            .zip(&all)
            .enumerate()
            .filter_map(|(i, (run, samples))| {
                let last = samples.last()?;
                let name = format!("{}{} <small>step {}</small>", swatch(i), Text(&run.name), count(last.step));
                Some((name, last))
            })
            .collect();
        sample_table(out, "The last predictions of all runs", &columns);
    }
    for (i, (run, samples)) in runs.iter().zip(&all).enumerate().filter(|(_, (_, samples))| !samples.is_empty()) {
        let columns = spread(samples, SAMPLE_COLUMNS).into_iter();
        let columns: Vec<_> = columns.map(|column| (format!("step {}", count(column.step)), column)).collect();
        let caption = format!("Predictions of {} over time", run.name);
        if runs.len() == 1 {
            sample_table(out, &caption, &columns);
        } else {
            line!(out, "<details><summary dir=\"auto\">{}{}: over time</summary>", swatch(i), Text(&run.name));
            sample_table(out, &caption, &columns);
            line!(out, "</details>");
        }
    }
    line!(out, "</section>");
}

/// A row for each blank of the last column's texts. The columns' names are HTML.
fn sample_table(out: &mut String, caption: &str, columns: &[(String, &Samples)]) {
    let Some((_, last)) = columns.last() else { return };
    begin_table(out, caption);
    line!(out, "<thead><tr><th scope=\"col\">text</th>");
    columns.iter().for_each(|(name, _)| line!(out, "<th scope=\"col\" dir=\"auto\">{name}</th>"));
    line!(out, "</tr></thead>\n<tbody class=\"samples\">");
    for (t, sample) in last.texts.iter().enumerate() {
        for b in 0..sample.blanks.len() {
            line!(out, "<tr><th scope=\"row\" dir=\"auto\">{}</th>", with_blank(&sample.text, b, sample.blanks.len()));
            for (_, column) in columns {
                let same = column.texts.get(t).filter(|other| other.text == sample.text);
                predictions(out, same.and_then(|other| other.blanks.get(b)).map_or(&[], Vec::as_slice));
            }
            line!(out, "</tr>");
        }
    }
    line!(out, "</tbody>");
    end_table(out);
}

fn predictions(out: &mut String, predictions: &[Prediction]) {
    if predictions.is_empty() {
        line!(out, "<td>–</td>");
        return;
    }
    line!(out, "<td><ol>");
    for Prediction { token, probability } in predictions {
        let share = if probability.is_finite() { probability.clamp(0.0, 1.0) } else { 0.0 };
        let per_cent = if share >= 0.0995 { format!("{:.0}", 100.0 * share) } else { format!("{:.1}", 100.0 * share) };
        line!(
            out,
            "<li style=\"--share:{share:.4}\"><span dir=\"auto\">{}</span> <span>{per_cent}%</span></li>",
            Text(token)
        );
    }
    line!(out, "</ol></td>");
}

/// A text with one of its blanks marked, where it has as many masks as blanks.
fn with_blank(text: &str, blank: usize, blanks: usize) -> String {
    for mask in ["[MASK]", "<mask>"] {
        let parts: Vec<&str> = text.split(mask).collect();
        if parts.len() != blanks + 1 {
            continue;
        }
        let mut out = Text(parts[0]).to_string();
        for (i, part) in parts[1..].iter().enumerate() {
            let tag = if i == blank { "mark" } else { "span" };
            let _ = write!(out, "<{tag}>{}</{tag}>{}", Text(mask), Text(part));
        }
        return out;
    }
    let which = if blanks > 1 { format!(" <small>blank {}</small>", blank + 1) } else { String::new() };
    format!("{}{which}", Text(text))
}

/// The recipe; of several, first what differs.
fn recipes(out: &mut String, runs: &[Run]) {
    if runs.iter().all(|run| run.recipe.is_empty()) {
        return;
    }
    line!(out, "<section id=\"recipe\" aria-labelledby=\"recipe-title\">");
    line!(out, "<h2 id=\"recipe-title\">{}</h2>", if runs.len() == 1 { "Recipe" } else { "Recipes" });
    if let [run] = runs {
        line!(out, "<pre dir=\"auto\" tabindex=\"0\">{}</pre>\n</section>", Text(&run.recipe));
        return;
    }
    let mut keys: Vec<String> = Vec::new();
    let mut values: Vec<BTreeMap<String, String>> = Vec::new();
    for run in runs {
        let recipe = toml::from_str::<serde_json::Value>(&run.recipe).map(|recipe| flat(&recipe)).unwrap_or_default();
        for (key, _) in &recipe {
            if !keys.contains(key) {
                keys.push(key.clone());
            }
        }
        values.push(recipe.into_iter().collect());
    }
    let total = keys.len();
    // A run whose recipe is not there, or cannot be read, differs in nothing.
    let known: Vec<_> = values.iter().filter(|recipe| !recipe.is_empty()).collect();
    let differs = |recipe: &BTreeMap<String, String>, key: &str| {
        !recipe.is_empty() && known.first().is_some_and(|first| first.get(key) != recipe.get(key))
    };
    keys.retain(|key| known.iter().any(|recipe| differs(recipe, key)));
    if keys.is_empty() && total > 0 {
        line!(out, "<p>All {total} settings are the same.</p>");
    } else if !keys.is_empty() {
        begin_table(out, "Settings that differ");
        line!(out, "<thead><tr><th scope=\"col\">setting</th>");
        runs.iter().enumerate().for_each(|(i, run)| line!(out, "{}", run_cell("col", "", i, &run.name)));
        line!(out, "</tr></thead>\n<tbody>");
        for key in &keys {
            line!(out, "<tr><th scope=\"row\"><code>{}</code></th>", Text(key));
            for recipe in &values {
                let class = if differs(recipe, key) { " class=\"differs\"" } else { "" };
                line!(out, "<td{class}>{}</td>", Text(recipe.get(key).map_or("–", String::as_str)));
            }
            line!(out, "</tr>");
        }
        line!(out, "</tbody>");
        end_table(out);
        line!(out, "<p class=\"hint\">Not shown: {} that are the same in all runs.</p>", total - keys.len());
    }
    for (i, run) in runs.iter().enumerate().filter(|(_, run)| !run.recipe.is_empty()) {
        let (swatch, name) = (swatch(i), Text(&run.name));
        line!(out, "<details><summary dir=\"auto\">{swatch}{name}: the whole recipe</summary>");
        line!(out, "<pre tabindex=\"0\">{}</pre></details>", Text(&run.recipe));
    }
    line!(out, "</section>");
}

/// Pairs of names and values, a column for each run.
fn facts(out: &mut String, id: &str, title: &str, runs: &[Run], of: impl Fn(&Run) -> &Vec<(String, String)>) {
    let mut labels: Vec<&str> = Vec::new();
    for (label, _) in runs.iter().flat_map(&of) {
        if !labels.contains(&label.as_str()) {
            labels.push(label);
        }
    }
    if labels.is_empty() {
        return;
    }
    line!(out, "<section id=\"{id}\" aria-labelledby=\"{id}-title\">\n<h2 id=\"{id}-title\">{title}</h2>");
    begin_table(out, title);
    if runs.len() > 1 {
        line!(out, "<thead><tr><th></th>");
        runs.iter().enumerate().for_each(|(i, run)| line!(out, "{}", run_cell("col", " number", i, &run.name)));
        line!(out, "</tr></thead>");
    }
    line!(out, "<tbody>");
    for label in labels {
        line!(out, "<tr><th scope=\"row\">{}</th>", Text(label));
        for run in runs {
            let value = of(run).iter().find(|(name, _)| name == label).map_or("–", |(_, value)| value);
            line!(out, "<td class=\"number\">{}</td>", Text(value));
        }
        line!(out, "</tr>");
    }
    line!(out, "</tbody>");
    end_table(out);
    line!(out, "</section>");
}

/// What was taken for what, of each run that has such.
fn confusions(out: &mut String, runs: &[Run]) {
    if runs.iter().all(|run| run.confusions.is_empty()) {
        return;
    }
    line!(out, "<section id=\"confusions\" aria-labelledby=\"confusions-title\">");
    line!(out, "<h2 id=\"confusions-title\">Most frequent confusions</h2>");
    begin_table(out, "Most frequent confusions");
    let run = if runs.len() > 1 { "<th>Run</th>" } else { "" };
    line!(
        out,
        "<thead><tr>{run}<th>Label</th><th>Predicted</th><th class=\"number\">Examples</th></tr></thead><tbody>"
    );
    for (i, run) in runs.iter().enumerate() {
        for confused in &run.confusions {
            let name = if runs.len() > 1 { run_cell("row", "", i, &run.name) } else { String::new() };
            let (expected, predicted) = (Text(&confused.expected), Text(&confused.predicted));
            line!(out, "<tr>{name}<td dir=\"auto\">{expected}</td><td dir=\"auto\">{predicted}</td>");
            line!(out, "<td class=\"number\">{}</td></tr>", count(confused.count));
        }
    }
    line!(out, "</tbody>");
    end_table(out);
    line!(out, "</section>");
}

fn notes(out: &mut String, runs: &[Run]) {
    let of = |run: &Run| -> Vec<Note> {
        run.lines
            .iter()
            .filter_map(|line| if let Line::Note(note) = line { Some(note.clone()) } else { None })
            .collect()
    };
    if runs.iter().all(|run| of(run).is_empty()) {
        return;
    }
    line!(out, "<section id=\"notes\" aria-labelledby=\"notes-title\">\n<h2 id=\"notes-title\">Notes</h2>");
    for (i, run) in runs.iter().enumerate() {
        let notes = of(run);
        if notes.is_empty() {
            continue;
        }
        heading(out, runs, i);
        line!(out, "<ul class=\"notes\">");
        for note in notes.iter().take(NOTES) {
            line!(out, "<li><b>step {}</b> <span dir=\"auto\">{}</span></li>", count(note.step), Text(&note.text));
        }
        if notes.len() > NOTES {
            line!(out, "<li>… and {} more in its log</li>", notes.len() - NOTES);
        }
        line!(out, "</ul>");
    }
    line!(out, "</section>");
}

/// The curves as tables, for those who cannot see or run the others.
fn numbers(out: &mut String, runs: &[Run]) {
    if runs.iter().all(|run| run.train().is_empty() && run.evals().is_empty()) {
        return;
    }
    line!(out, "<section id=\"numbers\" aria-labelledby=\"numbers-title\">\n<h2 id=\"numbers-title\">Numbers</h2>");
    for (i, run) in runs.iter().enumerate() {
        let of = if runs.len() > 1 { format!("{}{}: ", swatch(i), Text(&run.name)) } else { String::new() };
        let (evals, train) = (run.evals(), run.train());
        if !evals.is_empty() {
            let names: BTreeMap<String, ()> =
                evals.iter().flat_map(|eval| eval.metrics.keys().map(|name| (name.clone(), ()))).collect();
            let names: Vec<&String> = in_order(&names).map(|(name, ())| name).take(METRICS).collect();
            let head: Vec<String> = names.iter().map(|name| words(name)).collect();
            let head: Vec<&str> = head.iter().map(String::as_str).collect();
            let rows = spread(&evals, TABLE_ROWS).into_iter().map(|eval| {
                let cell =
                    |name: &&String| eval.metrics.get(*name).map_or("–".to_owned(), |value| metric(name, *value));
                (eval.step, names.iter().map(cell).collect())
            });
            number_table(out, &format!("{of}held-out metrics"), &head, rows);
        }
        if !train.is_empty() {
            let head = ["loss", "learning rate", "gradient norm", "tokens/s", "tokens", "time"];
            let rows = spread(&train, TABLE_ROWS).into_iter().map(|line| {
                let [loss, rate, norm] = [line.loss, line.learning_rate, line.gradient_norm].map(digits);
                let [speed, tokens] = [line.tokens_per_s, line.tokens as f64].map(short);
                (line.step, vec![loss, rate, norm, speed, tokens, duration(line.seconds)])
            });
            number_table(out, &format!("{of}training"), &head, rows);
        }
    }
    line!(out, "</section>");
}

/// A table that is closed at first. `title` is HTML.
fn number_table(out: &mut String, title: &str, head: &[&str], rows: impl Iterator<Item = (u64, Vec<String>)>) {
    line!(out, "<details><summary dir=\"auto\">{title}</summary>");
    begin_table(out, "Numbers by step");
    line!(out, "<thead><tr><th scope=\"col\" class=\"number\">step</th>");
    head.iter().for_each(|label| line!(out, "<th scope=\"col\" class=\"number\">{}</th>", Text(label)));
    line!(out, "</tr></thead>\n<tbody>");
    for (step, cells) in rows {
        let cells: String = cells.iter().map(|cell| format!("<td class=\"number\">{}</td>", Text(cell))).collect();
        line!(out, "<tr><th scope=\"row\" class=\"number\">{}</th>{cells}</tr>", count(step));
    }
    line!(out, "</tbody>");
    end_table(out);
    line!(out, "</details>");
}

/// Tables scroll by themselves, so that the page never does sideways; by keyboard too.
pub(super) fn begin_table(out: &mut String, caption: &str) {
    let caption = Text(caption);
    line!(out, "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table>");
    line!(out, "<caption class=\"unseen\">{caption}</caption>");
}

pub(super) fn end_table(out: &mut String) {
    line!(out, "</table></div>");
}

/// The name of a run above its part of a section, where there are several.
fn heading(out: &mut String, runs: &[Run], i: usize) {
    if runs.len() > 1 {
        line!(out, "<h3 dir=\"auto\">{}{}</h3>", swatch(i), Text(&runs[i].name));
    }
}

/// The cell of a table that names a run.
fn run_cell(scope: &str, class: &str, run: usize, name: &str) -> String {
    let (swatch, name) = (swatch(run), Text(name));
    format!("<th scope=\"{scope}\" class=\"name{class}\" dir=\"auto\" title=\"{name}\">{swatch}{name}</th>")
}

/// The colour of a run.
fn swatch(run: usize) -> String {
    let dashed = if run < COLOURS { "" } else { " dashed" };
    format!("<i class=\"swatch c{}{dashed}\" aria-hidden=\"true\"></i>", run % COLOURS)
}

/// At most `most` of some things, spread evenly, with the first and the last.
fn spread<T>(all: &[T], most: usize) -> Vec<&T> {
    if all.len() <= most {
        return all.iter().collect();
    }
    (0..most).map(|i| &all[i * (all.len() - 1) / (most - 1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_not_looked_at() {
        let filled = fill("a {{x}} b {{y}}{{x}}", |name| format!("<{{{{{name}}}}}>"));
        assert_eq!(filled, "a <{{x}}> b <{{y}}><{{x}}>");
    }

    #[test]
    fn hashes_as_browsers_make_them() {
        // printf '' | openssl dgst -sha256 -binary | base64
        assert_eq!(hash(""), "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
    }

    #[test]
    fn blanks_are_marked_one_by_one() {
        assert_eq!(with_blank("a [MASK] <b", 0, 1), "a <mark>[MASK]</mark> &lt;b");
        assert_eq!(with_blank("<mask><mask>", 1, 2), "<span>&lt;mask&gt;</span><mark>&lt;mask&gt;</mark>");
        assert_eq!(with_blank("no masks", 1, 2), "no masks <small>blank 2</small>");
    }

    #[test]
    fn some_of_many_with_both_ends() {
        let all: Vec<usize> = (0..100).collect();
        let some = spread(&all, 8);
        assert_eq!((some.len(), *some[0], *some[7]), (8, 0, 99));
        assert!(some.is_sorted_by(|a, b| a < b) && spread(&all[..8], 8).len() == 8 && spread(&all[..0], 8).is_empty());
    }
}
