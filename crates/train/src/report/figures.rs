//! A page of findings that are no course of training: figures, tables, and plots over a few places, such as the layers of a model.
//! Plots are drawn here, so that the page needs no script.

use std::fmt::Write;

use super::html::Text;
use super::page::{assemble, begin_table, end_table};

/// A line of HTML. Writing to a string cannot fail.
macro_rules! line {
    ($out:expr, $($argument:tt)*) => {{
        let _ = writeln!($out, $($argument)*);
    }};
}

/// The size of a plot, and where its frame begins and ends.
const SIZE: (f64, f64) = (560.0, 240.0);
const FRAME: [f64; 4] = [48.0, 12.0, 548.0, 204.0];

/// A page.
#[derive(Clone, Debug, Default)]
pub struct FigurePage {
    /// What stands above it, beside henson's name.
    pub kind: String,
    /// Its title.
    pub title: String,
    /// A line below it.
    pub lead: String,
    /// The numbers that people look at first, with what they are.
    pub cards: Vec<(String, String)>,
    /// Plots.
    pub plots: Vec<Plot>,
    /// Tables.
    pub tables: Vec<Table>,
}

/// Values at a few places.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// What the places are called together, such as `layer`.
    pub across: String,
    /// The name of each place.
    pub places: Vec<String>,
    /// The curves, or bars, each with as many values as there are places, or fewer.
    pub series: Vec<Series>,
    /// Whether they are drawn as bars from zero, and not as curves.
    pub bars: bool,
}

/// One curve, or one set of bars.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// What it is.
    pub name: String,
    /// Its values, from the first place on.
    pub values: Vec<f64>,
}

/// A table; all but the first column are numbers.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// What it shows.
    pub title: String,
    /// The names of its columns.
    pub columns: Vec<String>,
    /// Its rows.
    pub rows: Vec<Vec<String>>,
}

impl FigurePage {
    /// The page. Equal findings give equal bytes.
    pub fn render(&self) -> String {
        let (mut header, mut sections) = (String::new(), String::new());
        line!(header, "<p class=\"brand\">henson <span>{}</span></p>", Text(&self.kind));
        line!(header, "<h1 dir=\"auto\">{}</h1>\n<p class=\"lead\">{}</p>", Text(&self.title), Text(&self.lead));
        line!(sections, "<section id=\"summary\" aria-labelledby=\"summary-title\">");
        line!(sections, "<h2 id=\"summary-title\" class=\"unseen\">Results</h2>\n<dl class=\"cards\">");
        for (label, value) in &self.cards {
            line!(sections, "<div><dt>{}</dt><dd>{}</dd></div>", Text(label), Text(value));
        }
        line!(sections, "</dl>\n</section>\n<section id=\"plots\"><div class=\"charts\">");
        self.plots.iter().for_each(|plot| plot.draw(&mut sections));
        line!(sections, "</div></section>\n<section id=\"numbers\">");
        self.tables.iter().for_each(|table| table.write(&mut sections));
        line!(sections, "</section>");
        assemble(&self.title, &header, &sections, "{}", "")
    }
}

impl Plot {
    fn draw(&self, out: &mut String) {
        let all = || self.series.iter().flat_map(|series| &series.values).copied().filter(|value| value.is_finite());
        let (low, high) = all().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        let (low, high) = if self.bars { (low.min(0.0), high.max(0.0)) } else { (low, high) };
        if !(low.is_finite() && high.is_finite()) {
            return;
        }
        // Curves keep some air; a flat one stands in the middle.
        let air = if high > low { (high - low) * 0.08 } else { high.abs().max(1.0) * 0.1 };
        let (low, high) = if self.bars { (low, high + air) } else { (low - air, high + air) };
        let [left, top, right, bottom] = FRAME;
        let y = |value: f64| bottom - (value - low) / (high - low) * (bottom - top);
        let slot = (right - left) / self.places.len().max(1) as f64;
        let x = |place: usize| left + (place as f64 + 0.5) * slot;
        line!(out, "<figure><figcaption><h3>{}</h3></figcaption>", Text(&self.title));
        let (width, height) = SIZE;
        line!(
            out,
            "<div class=\"plot\"><svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">",
            Text(&self.in_words())
        );
        for i in 0..=4 {
            let value = low + (high - low) * f64::from(i) / 4.0;
            let at = y(value);
            line!(out, "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
            line!(out, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value:.2}</text>", left - 6.0, at + 4.0);
        }
        let every = self.places.len().div_ceil(24).max(1);
        for (place, name) in self.places.iter().enumerate().step_by(every) {
            let (at, below) = (x(place), bottom + 16.0);
            line!(out, "<text x=\"{at:.1}\" y=\"{below:.1}\" text-anchor=\"middle\">{}</text>", Text(name));
        }
        let middle = f64::midpoint(left, right);
        line!(
            out,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            height - 4.0,
            Text(&self.across)
        );
        for (number, series) in self.series.iter().enumerate() {
            let points = series.values.iter().enumerate().filter(|(_, value)| value.is_finite());
            if self.bars {
                let wide = 0.8 * slot / self.series.len() as f64;
                for (place, value) in points {
                    let from = x(place) - 0.4 * slot + number as f64 * wide;
                    let (up, down) = (y(value.max(0.0)), y(value.min(0.0)));
                    line!(
                        out,
                        "<rect class=\"c{}\" fill=\"var(--run)\" x=\"{from:.1}\" y=\"{up:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
                        number % 8,
                        wide * 0.92,
                        down - up
                    );
                }
            } else {
                let path: Vec<String> =
                    points.map(|(place, value)| format!("{:.1},{:.1}", x(place), y(*value))).collect();
                line!(out, "<polyline class=\"curve c{}\" points=\"{}\"/>", number % 8, path.join(" "));
            }
        }
        line!(out, "</svg></div>");
        if self.series.len() > 1 {
            let name = |(number, series): (usize, &Series)| {
                format!("<span class=\"c{}\"><i class=\"swatch\"></i>{}</span>", number % 8, Text(&series.name))
            };
            let names: Vec<String> = self.series.iter().enumerate().map(name).collect();
            line!(out, "<p class=\"hint\">{}</p>", names.join(" &nbsp; "));
        }
        line!(out, "</figure>");
    }

    /// For those who do not see it.
    fn in_words(&self) -> String {
        let mut words = format!("{}.", self.title);
        for series in &self.series {
            let values: Vec<String> = series.values.iter().map(|value| format!("{value:.3}")).collect();
            let _ = write!(words, " {} by {}: {}.", series.name, self.across, values.join(", "));
        }
        words
    }
}

impl Table {
    fn write(&self, out: &mut String) {
        line!(out, "<h2>{}</h2>", Text(&self.title));
        begin_table(out, &self.title);
        line!(out, "<thead><tr>");
        for (i, column) in self.columns.iter().enumerate() {
            let class = if i > 0 { " class=\"number\"" } else { "" };
            line!(out, "<th scope=\"col\"{class}>{}</th>", Text(column));
        }
        line!(out, "</tr></thead>\n<tbody>");
        for row in &self.rows {
            line!(out, "<tr>");
            for (i, cell) in row.iter().enumerate() {
                match i {
                    0 => line!(out, "<th scope=\"row\">{}</th>", Text(cell)),
                    _ => line!(out, "<td class=\"number\">{}</td>", Text(cell)),
                }
            }
            line!(out, "</tr>");
        }
        line!(out, "</tbody>");
        end_table(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_stays_text() {
        let evil = "<script>alert(1)</script>\"'&".to_owned();
        let (bars, curve) = (vec![0.25, 0.75], vec![0.5, f64::NAN]);
        let series = |values: Vec<f64>| {
            vec![Series { name: evil.clone(), values: values.clone() }, Series { name: "b".to_owned(), values }]
        };
        let plot = |bars: bool, values: Vec<f64>| Plot {
            title: evil.clone(),
            across: evil.clone(),
            places: vec![evil.clone(), "1".to_owned()],
            series: series(values),
            bars,
        };
        let page = FigurePage {
            kind: evil.clone(),
            title: evil.clone(),
            lead: evil.clone(),
            cards: vec![(evil.clone(), evil.clone())],
            plots: vec![plot(true, bars), plot(false, curve), plot(false, vec![f64::NAN])],
            tables: vec![Table {
                title: evil.clone(),
                columns: vec![evil.clone(); 2],
                rows: vec![vec![evil.clone(); 2]],
            }],
        };
        let html = page.render();
        assert!(!html.contains("<script>alert"), "{html}");
        assert_eq!(html.matches("<svg").count(), 2, "nothing is drawn of what is not finite");
        // The larger of two bars is three times as high as the smaller, whose top is at the third line of four.
        assert_eq!((html.matches("<rect").count(), html.matches("<polyline").count()), (4, 2));
        assert_eq!(html, page.render());
        let heights: Vec<f64> =
            html.split("height=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse().ok()).collect();
        assert!((heights[1] / heights[0] - 3.0).abs() < 0.01, "{heights:?}");
    }
}
