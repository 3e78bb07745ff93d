//! The page of a probing.

use henson_train::report::{FigurePage, Plot, Series, Table};

use super::scores::ProbeResults;

/// The most labels in the table.
const LABELS: usize = 100;

pub(super) fn render(results: &ProbeResults) -> String {
    let full = &results.full;
    let percent = |value: f64| format!("{:.1}%", 100.0 * value);
    let mut cards = vec![
        ("F1, all layers".to_owned(), percent(full.f1)),
        ("centre of gravity".to_owned(), format!("{:.2}", full.centre_of_gravity)),
    ];
    let expected = results.cumulative.as_ref().and_then(|cumulative| cumulative.expected_layer);
    cards.extend(expected.map(|layer| ("expected layer".to_owned(), format!("{layer:.2}"))));
    if let Some(control) = &results.control {
        cards.push(("F1, control task".to_owned(), percent(control.f1)));
        cards.push(("selectivity".to_owned(), format!("{:.1} points", 100.0 * control.selectivity)));
    }
    cards.extend(results.random_encoder.as_ref().map(|score| ("F1, random encoder".to_owned(), percent(score.f1))));
    let layers = full.mixing_weights.len();
    let places: Vec<String> = (0..layers).map(|layer| layer.to_string()).collect();
    let series = |name: &str, values: &[f64]| Series { name: name.to_owned(), values: values.to_vec() };
    let plot = |title: &str, bars: bool, series: Vec<Series>| Plot {
        title: title.to_owned(),
        across: "layer (0: embeddings)".to_owned(),
        places: places.clone(),
        series,
        bars,
    };
    let mut weights = vec![series("this encoder", &full.mixing_weights)];
    weights.extend(results.random_encoder.iter().map(|score| series("random weights", &score.mixing_weights)));
    let mut plots = vec![plot("Mixing weights", true, weights)];
    let mut by_layer = Table {
        title: "By layer".to_owned(),
        columns: vec!["layer".to_owned(), "mixing weight".to_owned()],
        rows: (0..layers).map(|layer| vec![layer.to_string(), format!("{:.4}", full.mixing_weights[layer])]).collect(),
    };
    if let Some(cumulative) = &results.cumulative {
        plots.push(plot("F1 of probes on layers 0 to ℓ", false, vec![series("F1", &cumulative.f1)]));
        let gains: Vec<f64> = [0.0].iter().chain(&cumulative.differences).copied().collect();
        plots.push(plot("What layer ℓ adds", true, vec![series("gain in F1", &gains)]));
        by_layer.columns.extend(["F1 of layers 0 to ℓ".to_owned(), "gain".to_owned()]);
        for (layer, row) in by_layer.rows.iter_mut().enumerate() {
            let gain = layer.checked_sub(1).map_or("–".to_owned(), |i| format!("{:+.4}", cumulative.differences[i]));
            row.extend([format!("{:.4}", cumulative.f1[layer]), gain]);
        }
    }
    let label = |(name, f1): (&String, &f64)| vec![name.clone(), format!("{f1:.4}")];
    let labels = Table {
        title: "By label, all layers".to_owned(),
        columns: vec!["label".to_owned(), "F1".to_owned()],
        rows: full.labels.iter().take(LABELS).map(label).collect(),
    };
    let lead = format!(
        "{} labels; trained on {} targets in {} texts, scored on {} in {}; seed {}",
        results.label_count,
        results.train.targets,
        results.train.texts,
        results.dev.targets,
        results.dev.texts,
        results.seed
    );
    let title = format!("{} in {}", results.task, results.model);
    FigurePage { kind: "probing report".to_owned(), title, lead, cards, plots, tables: vec![by_layer, labels] }.render()
}
