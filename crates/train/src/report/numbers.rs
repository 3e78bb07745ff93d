//! Numbers as people write them: the same on a page and in a terminal.

/// 12,345,678
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// 999, 12.3 k, 4.56 M
pub fn short(n: f64) -> String {
    let (mut n, mut unit) = (n, 0);
    const UNITS: [&str; 6] = ["", " k", " M", " G", " T", " P"];
    // 999.5 would be written as 1000.
    while n.abs() >= 999.5 && unit + 1 < UNITS.len() {
        (n, unit) = (n / 1000.0, unit + 1);
    }
    if !n.is_finite() {
        return "–".to_owned();
    }
    let places = match n.abs() {
        _ if unit == 0 && n.fract() == 0.0 => 0,
        x if x < 9.995 => 2,
        x if x < 99.95 => 1,
        _ => 0,
    };
    format!("{n:.places$}{}", UNITS[unit])
}

/// 12 s, 3 min 20 s, 5 h 12 min, 2 d 4 h
pub fn duration(seconds: f64) -> String {
    if !(0.0..1e12).contains(&seconds) {
        return "–".to_owned();
    }
    let s = seconds.round() as u64;
    match s {
        0..10 => format!("{seconds:.1} s"),
        10..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} d {} h", s / 86400, s / 3600 % 24),
    }
}

/// Whether a metric is a share of something, and so shown in per cent.
pub fn is_share(name: &str) -> bool {
    let shares = ["accuracy", "f1", "precision", "recall", "exact_match", "parity"];
    let errors_and_rouge = ["wer", "per"].contains(&name) || name.starts_with("rouge");
    (shares.iter().any(|share| name.contains(share)) && !name.contains("threshold")) || errors_and_rouge
}

/// Shares in per cent, others with four digits.
pub fn metric(name: &str, value: f64) -> String {
    if is_share(name) && (0.0..=1.0).contains(&value) {
        return format!("{:.1}%", 100.0 * value);
    }
    digits(value)
}

/// Four digits that count: 2.317, 0.0001, 1.25e-5, 10,340.
pub fn digits(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "not a number".to_owned(),
        _ if value.is_infinite() => "not finite".to_owned(),
        0.0 => "0".to_owned(),
        x if x < 1e-3 => format!("{:.3e}", value).replace(".000e", "e"),
        x if x < 9.9995 => format!("{value:.3}"),
        x if x < 99.995 => format!("{value:.2}"),
        x if x < 9999.5 => format!("{value:.1}"),
        x if x < 1e15 => format!("{}{}", if value < 0.0 { "-" } else { "" }, count(x.round() as u64)),
        _ => format!("{value:.3e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [0, 7, 999, 1000, 123_456, 1_234_567].map(count),
            ["0", "7", "999", "1,000", "123,456", "1,234,567"]
        );
        let shorts = [0.0, 12.0, 12.34, 999.0, 999.7, 16_400.0, 61_440_000.0, 2.5e12, 1e30, f64::NAN];
        let expected = ["0", "12", "12.3", "999", "1.00 k", "16.4 k", "61.4 M", "2.50 T"];
        assert_eq!(shorts.map(short)[..8], expected);
        assert_eq!(short(f64::NAN), "–");
        let durations = [0.0, 9.94, 59.4, 59.6, 3599.0, 18_720.0, 200_000.0, -1.0, f64::NAN];
        let expected =
            ["0.0 s", "10 s", "59 s", "1 min 0 s", "59 min 59 s", "5 h 12 min", "2 d 7 h", "–", "–"].map(str::to_owned);
        assert_eq!(durations.map(duration), expected);
        let values = [0.0, 2.31715, -0.5, 1e-4, 1.25e-5, 45.678, 123.456, 10_340.2, -10_340.2, 1e20, f64::INFINITY];
        let expected = [
            "0",
            "2.317",
            "-0.500",
            "1e-4",
            "1.250e-5",
            "45.68",
            "123.5",
            "10,340",
            "-10,340",
            "1.000e20",
            "not finite",
        ];
        assert_eq!(values.map(digits), expected.map(str::to_owned));
        assert_eq!(metric("nsp_accuracy", 0.8345), "83.5%");
        assert_eq!(metric("accuracy", 83.45), "83.45");
    }
}
