//! Scores of vectors.

/// Pairs among which a partner is to be found.
const GROUP: usize = 256;

/// The cosine of two vectors; 0 where one has no length.
pub fn cosine(first: &[f32], second: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let lengths = (dot(first, first) * dot(second, second)).sqrt();
    if lengths > 0.0 { (dot(first, second) / lengths).clamp(-1.0, 1.0) } else { 0.0 }
}

/// For each pair the one whose second vector is nearest to its first, by the cosine; none where its own cosine is not a
/// number. Of several that are as near it is never the pair itself, since a model that gives all texts the same vector finds
/// nothing; only pairs whose second text is the same, by `texts`, give way to it. To find it among all would be quadratic
/// work, so each looks among at most 256 neighbours, in groups of nearly the same size.
pub fn nearest<V: AsRef<[f32]>, T: PartialEq>(pairs: &[[V; 2]], texts: &[T]) -> Vec<Option<usize>> {
    let unit = |vector: &V| -> Vec<f32> {
        let length = vector.as_ref().iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-12);
        vector.as_ref().iter().map(|x| x / length).collect()
    };
    let groups = pairs.len().div_ceil(GROUP).max(1);
    let mut found = Vec::with_capacity(pairs.len());
    for group in pairs.chunks(pairs.len().div_ceil(groups).max(1)) {
        let start = found.len();
        let seconds: Vec<Vec<f32>> = group.iter().map(|[_, second]| unit(second)).collect();
        for (own, [first, _]) in group.iter().enumerate() {
            let first = unit(first);
            let dot = |other: usize| first.iter().zip(&seconds[other]).map(|(x, y)| x * y).sum::<f32>();
            let mut best = (own, dot(own));
            if !best.1.is_finite() {
                found.push(None);
                continue;
            }
            for other in 0..group.len() {
                let score = dot(other);
                let ties = score == best.1 && best.0 == own && texts.get(start + other) != texts.get(start + own);
                if score > best.1 || ties {
                    best = (other, score);
                }
            }
            found.push(Some(start + best.0));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosines() {
        assert_eq!(cosine(&[3.0, 0.0], &[0.0, 2.0]), 0.0);
        assert!((cosine(&[1.0, 1.0], &[2.0, 0.0]) - 0.5f64.sqrt()).abs() < 1e-12);
        assert_eq!(cosine(&[1.0, 2.0], &[-1.0, -2.0]), -1.0);
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 0.0]), 0.0);
    }

    #[test]
    fn partners_are_found_among_neighbours() {
        let at = |angle: f32| vec![5.0 * angle.cos(), 5.0 * angle.sin()];
        let pairs: Vec<[Vec<f32>; 2]> = [0.0, 1.0, 2.0].iter().map(|angle| [at(*angle), at(angle + 0.1)]).collect();
        let nearest = |pairs: &[[Vec<f32>; 2]], texts: &[&str]| nearest(pairs, texts);
        assert_eq!(nearest(&pairs, &["a", "b", "c"]), [0, 1, 2].map(Some));
        let wrong = [pairs[0].clone(), [at(1.0), at(0.02)], pairs[2].clone()];
        assert_eq!(nearest(&wrong, &["a", "b", "c"]), [1, 0, 2].map(Some));
        // Equal ones are no nearer where they are the same text, and a miss where they are another.
        let equal = vec![pairs[0].clone(); 2];
        assert_eq!(nearest(&equal, &["a", "a"]), [0, 1].map(Some));
        assert_eq!(nearest(&equal, &["a", "b"]), [1, 0].map(Some));
        for nothing in [0.0, f32::NAN] {
            let collapsed = vec![[vec![nothing; 2], vec![nothing; 2]]; 3];
            let found = nearest(&collapsed, &["a", "b", "c"]);
            assert!(found.iter().enumerate().all(|(own, found)| *found != Some(own)), "{found:?}");
        }
        // Beyond a group nobody looks: 300 pairs are two groups of 150.
        let mut many = vec![[at(0.0), at(1.0)]; 300];
        many[299] = [at(0.0), at(0.0)];
        let found = nearest(&many, &["a"; 300]);
        assert!(found[..150].iter().enumerate().all(|(i, found)| Some(i) == *found));
        assert!(found[150..].iter().all(|found| *found == Some(299)));
        assert_eq!(nearest(&[], &[]), []);
    }
}
