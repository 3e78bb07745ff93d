//! Scores of rankings, by the definitions of sentence-transformers' InformationRetrievalEvaluator and, where relevance has grades, of
//! trec_eval; and of pairs that are alike or not, by those of its BinaryClassificationEvaluator.

use super::mean;

/// What was found for a query, and what should have been.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JudgedRanking {
    /// The relevance of what was found, best first; 0 where it is not relevant or nobody knows.
    pub found: Vec<f64>,
    /// The relevance of all that is relevant.
    pub relevant: Vec<f64>,
}

/// The means over queries for each cutoff k: `ndcg@k` by the grades of relevance, as trec_eval has it; `binary_ndcg@k`, where all that
/// is relevant counts the same; `mrr@k`, `map@k` (divided by what could be found, min(k, relevant)), `recall@k`, `precision@k`, and
/// `accuracy@k`, the share of queries with anything relevant. Queries without anything relevant count nothing.
pub fn ranking_scores(queries: &[JudgedRanking], cutoffs: &[usize]) -> Vec<(String, f64)> {
    type Score = fn(&JudgedRanking, usize) -> f64;
    let scores: [(&str, Score); 7] = [
        ("ndcg", |query, k| ndcg(&query.found, &query.relevant, k)),
        ("binary_ndcg", |query, k| {
            let binary =
                |grades: &[f64]| grades.iter().map(|grade| f64::from(u8::from(*grade > 0.0))).collect::<Vec<_>>();
            ndcg(&binary(&query.found), &binary(&query.relevant), k)
        }),
        ("mrr", |query, k| query.top(k).position(|hit| hit).map_or(0.0, |rank| 1.0 / (rank + 1) as f64)),
        ("map", |query, k| {
            let (mut right, mut sum) = (0, 0.0);
            for (rank, _) in query.top(k).enumerate().filter(|(_, hit)| *hit) {
                right += 1;
                sum += f64::from(right) / (rank + 1) as f64;
            }
            sum / query.relevant().min(k).max(1) as f64
        }),
        ("recall", |query, k| query.hits(k) / query.relevant().max(1) as f64),
        ("precision", |query, k| query.hits(k) / k.max(1) as f64),
        ("accuracy", |query, k| f64::from(u8::from(query.hits(k) > 0.0))),
    ];
    let judged = || queries.iter().filter(|query| query.relevant() > 0);
    let each = scores.iter().flat_map(|(name, score)| cutoffs.iter().map(move |k| (*name, *score, *k)));
    each.map(|(name, score, k)| (format!("{name}@{k}"), mean(judged().map(|query| score(query, k))))).collect()
}

impl JudgedRanking {
    fn relevant(&self) -> usize {
        self.relevant.iter().filter(|grade| **grade > 0.0).count()
    }

    /// Whether each of the first k is relevant.
    fn top(&self, k: usize) -> impl Iterator<Item = bool> {
        self.found.iter().take(k).map(|grade| *grade > 0.0)
    }

    fn hits(&self, k: usize) -> f64 {
        self.top(k).filter(|hit| *hit).count() as f64
    }
}

fn ndcg(found: &[f64], relevant: &[f64], k: usize) -> f64 {
    let gain = |grades: &mut dyn Iterator<Item = f64>| -> f64 {
        grades.take(k).enumerate().map(|(rank, grade)| grade.max(0.0) / ((rank + 2) as f64).log2()).sum()
    };
    let mut ideal = relevant.to_vec();
    ideal.sort_by(|a, b| b.total_cmp(a));
    let best = gain(&mut ideal.into_iter());
    if best > 0.0 { gain(&mut found.iter().copied()) / best } else { 0.0 }
}

/// How well documents are put in order: the means over queries of `ndcg` and `mrr` of the first k documents, and `map`, the average
/// precision over all of them, as CrossEncoderRerankingEvaluator has them. A query's documents are scores with their relevances.
/// Of equal scores, nDCG and average precision take what they are worth on average or together, as scikit-learn does; for the first
/// relevant one, those that are not relevant come first: a model that gives all the same finds nothing. Queries without anything
/// relevant count nothing.
pub fn reranking_scores(queries: &[Vec<(f32, f64)>], k: usize) -> [(&'static str, f64); 3] {
    let judged = || queries.iter().filter(|documents| documents.iter().any(|(_, relevance)| *relevance > 0.0));
    let reciprocal = |documents: &Vec<(f32, f64)>| {
        let mut documents = documents.clone();
        documents.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.total_cmp(&b.1)));
        let first = documents.iter().take(k).position(|(_, relevance)| *relevance > 0.0);
        first.map_or(0.0, |rank| 1.0 / (rank + 1) as f64)
    };
    let average = |documents: &Vec<(f32, f64)>| {
        let labels: Vec<bool> = documents.iter().map(|(_, relevance)| *relevance > 0.0).collect();
        let scores: Vec<f64> = documents.iter().map(|(score, _)| f64::from(*score)).collect();
        PairScores::new(&labels, &scores).average_precision
    };
    [
        ("ndcg", mean(judged().map(|documents| tied_ndcg(documents, k)))),
        ("mrr", mean(judged().map(reciprocal))),
        ("map", mean(judged().map(average))),
    ]
}

/// nDCG where documents with the same score share the mean of their places' discounts.
fn tied_ndcg(documents: &[(f32, f64)], k: usize) -> f64 {
    let mut sorted = documents.to_vec();
    sorted.sort_by(|a, b| b.0.total_cmp(&a.0));
    let discount = |rank: usize| if rank < k { 1.0 / ((rank + 2) as f64).log2() } else { 0.0 };
    let (mut gain, mut rank) = (0.0, 0);
    for equals in sorted.chunk_by(|a, b| a.0 == b.0) {
        let discounts: f64 = (rank..rank + equals.len()).map(discount).sum();
        gain += discounts * equals.iter().map(|(_, relevance)| relevance.max(0.0)).sum::<f64>() / equals.len() as f64;
        rank += equals.len();
    }
    let mut ideal: Vec<f64> = documents.iter().map(|(_, relevance)| relevance.max(0.0)).collect();
    ideal.sort_by(|a, b| b.total_cmp(a));
    let best: f64 = ideal.iter().enumerate().map(|(rank, relevance)| relevance * discount(rank)).sum();
    if best > 0.0 { gain / best } else { 0.0 }
}

/// How well a number tells pairs that are alike from others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairScores {
    /// Average precision: the mean precision over all that are alike, by scikit-learn's definition.
    pub average_precision: f64,
    /// The best accuracy that a threshold gives.
    pub accuracy: f64,
    /// That threshold, halfway between two pairs.
    pub accuracy_threshold: f64,
    /// The best F1 that a threshold gives.
    pub f1: f64,
    /// That threshold.
    pub f1_threshold: f64,
    /// The precision there.
    pub precision: f64,
    /// The recall there.
    pub recall: f64,
}

impl PairScores {
    /// Of labels (alike or not) and numbers, higher for those that are alike.
    pub fn new(labels: &[bool], numbers: &[f64]) -> Self {
        Self::among(labels, numbers, labels.iter().filter(|label| **label).count())
    }

    /// The same where so many are alike in all, of which only some were found to have a number. An accuracy is then of those that have
    /// one.
    pub fn among(labels: &[bool], numbers: &[f64], in_all: usize) -> Self {
        let mut order: Vec<usize> = (0..labels.len().min(numbers.len())).collect();
        order.sort_by(|a, b| numbers[*b].total_cmp(&numbers[*a]));
        let (alike, all) = (labels.iter().filter(|label| **label).count(), order.len());
        let mut found = Self::default();
        if let Some(first) = order.first() {
            // All are told to be different.
            (found.accuracy, found.accuracy_threshold) = ((all - alike) as f64 / all as f64, numbers[*first].next_up());
        }
        let (mut right, mut before) = (0, 0.0);
        for (i, row) in order.iter().enumerate() {
            right += usize::from(labels[*row]);
            let next = order.get(i + 1).map(|next| numbers[*next]);
            if next == Some(numbers[*row]) {
                continue;
            }
            // A midpoint that rounds to the next would include it.
            let between = |next: f64| Some((numbers[*row] + next) / 2.0).filter(|middle| *middle != next);
            let threshold = next.and_then(between).unwrap_or(numbers[*row]);
            let told = i + 1;
            let wrong = told - right;
            let accuracy = (right + (all - alike) - wrong) as f64 / all as f64;
            if accuracy > found.accuracy {
                (found.accuracy, found.accuracy_threshold) = (accuracy, threshold);
            }
            let (precision, recall) = (right as f64 / told as f64, right as f64 / in_all.max(1) as f64);
            found.average_precision += (recall - before) * precision;
            before = recall;
            let f1 = if right > 0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 };
            if f1 > found.f1 {
                (found.f1, found.f1_threshold, found.precision, found.recall) = (f1, threshold, precision, recall);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Query {
        found: Vec<f64>,
        relevant: Vec<f64>,
    }

    #[derive(Deserialize)]
    struct Rankings {
        queries: Vec<Query>,
        scores: BTreeMap<String, f64>,
        ndcg: BTreeMap<usize, f64>,
    }

    #[derive(Deserialize)]
    struct Trec {
        queries: Vec<Query>,
        ndcg: BTreeMap<usize, f64>,
    }

    #[derive(Deserialize)]
    struct Pairs {
        labels: Vec<u8>,
        scores: Vec<f64>,
        ap: f64,
        accuracy: f64,
        accuracy_threshold: f64,
        f1: f64,
        f1_threshold: f64,
        precision: f64,
        recall: f64,
    }

    #[derive(Deserialize)]
    struct Reranked {
        queries: Vec<Vec<(f32, f64)>>,
        ndcg: f64,
        mrr: Option<f64>,
        map: f64,
    }

    #[derive(Deserialize)]
    struct Mined {
        labels: Vec<u8>,
        scores: Vec<f64>,
        duplicates: usize,
        average_precision: f64,
        f1: f64,
        precision: f64,
        recall: f64,
        threshold: f64,
    }

    #[derive(Deserialize)]
    struct Golden {
        rankings: Rankings,
        trec: Trec,
        pairs: Vec<Pairs>,
        reranked: Vec<Reranked>,
        mined: Vec<Mined>,
    }

    fn golden() -> Golden {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/retrieval/golden.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn rankings_are_scored_as_sentence_transformers_does() {
        let Rankings { queries, scores, ndcg } = golden().rankings;
        let queries = queries.into_iter().map(|Query { found, relevant }| JudgedRanking { found, relevant });
        let mut queries: Vec<JudgedRanking> = queries.collect();
        // One that nothing is known about changes nothing.
        queries.push(JudgedRanking { found: vec![0.0; 3], relevant: Vec::new() });
        let got: BTreeMap<String, f64> = ranking_scores(&queries, &[1, 3, 5, 10]).into_iter().collect();
        assert_eq!(got.len(), 28);
        for (name, expected) in &scores {
            // There, relevance has no grades.
            let name = name.replace("ndcg@", "binary_ndcg@");
            assert!((got[&name] - expected).abs() < 1e-12, "{name}: {} {expected}", got[&name]);
        }
        for (k, expected) in ndcg {
            assert!((got[&format!("ndcg@{k}")] - expected).abs() < 1e-12, "{k}");
        }
        assert!(scores["map@10"] > 0.1 && scores["map@10"] < 0.9, "there is something to compare");
    }

    /// Grades below 0, documents that nobody judged, less found than asked for, a query that nothing is relevant to.
    #[test]
    fn odd_queries_are_scored_as_trec_eval_does() {
        let Trec { queries, ndcg } = golden().trec;
        let queries = queries.into_iter().map(|Query { found, relevant }| JudgedRanking { found, relevant });
        let got: BTreeMap<String, f64> =
            ranking_scores(&queries.collect::<Vec<_>>(), &[1, 3, 5, 10]).into_iter().collect();
        assert_eq!(ndcg.len(), 4);
        for (k, expected) in ndcg {
            assert!(
                (got[&format!("ndcg@{k}")] - expected).abs() < 1e-12,
                "{k}: {} {expected}",
                got[&format!("ndcg@{k}")]
            );
        }
    }

    #[test]
    fn orders_are_scored_as_rerankers_are() {
        let all = golden().reranked;
        assert!(all.len() > 3 && all.iter().any(|case| case.mrr.is_none()));
        for Reranked { queries, ndcg, mrr, map } in all {
            let got = reranking_scores(&queries, 10);
            // Of equals, the peer's first one is any.
            for ((name, got), expected) in got.into_iter().zip([Some(ndcg), mrr, Some(map)]) {
                assert!(expected.is_none_or(|expected| (got - expected).abs() < 1e-12), "{name}: {got} {expected:?}");
            }
        }
        let equal = reranking_scores(&[vec![(0.5, 0.0), (0.5, 1.0), (0.5, 0.0)], vec![(0.1, 0.0)]], 10);
        assert_eq!(
            (equal[1].1, equal[2].1),
            (1.0 / 3.0, 1.0 / 3.0),
            "nothing is told, and a query without an answer counts nothing"
        );
        assert_eq!(reranking_scores(&[], 10).map(|(_, score)| score), [0.0; 3]);
    }

    #[test]
    fn mined_paraphrases_are_scored_as_sentence_transformers_does() {
        for mined in golden().mined {
            let labels: Vec<bool> = mined.labels.iter().map(|label| *label == 1).collect();
            let got = PairScores::among(&labels, &mined.scores, mined.duplicates);
            let expected = [
                (got.average_precision, mined.average_precision),
                (got.f1, mined.f1),
                (got.precision, mined.precision),
                (got.recall, mined.recall),
                (got.f1_threshold, mined.threshold),
            ];
            assert!(expected.iter().all(|(got, expected)| (got - expected).abs() < 1e-12), "{expected:?}");
        }
    }

    #[test]
    fn pairs_are_scored_as_sentence_transformers_does() {
        for pairs in golden().pairs {
            let labels: Vec<bool> = pairs.labels.iter().map(|label| *label == 1).collect();
            let got = PairScores::new(&labels, &pairs.scores);
            let expected = [
                (got.average_precision, pairs.ap),
                (got.accuracy, pairs.accuracy),
                (got.accuracy_threshold, pairs.accuracy_threshold),
                (got.f1, pairs.f1),
                (got.f1_threshold, pairs.f1_threshold),
                (got.precision, pairs.precision),
                (got.recall, pairs.recall),
            ];
            assert!(expected.iter().all(|(got, expected)| (got - expected).abs() < 1e-12), "{expected:?}");
        }
        let none = PairScores::new(&[false, false], &[0.5, 0.1]);
        assert_eq!((none.average_precision, none.accuracy, none.f1), (0.0, 1.0, 0.0));
        assert_eq!(PairScores::new(&[], &[]), PairScores::default());
    }
}
