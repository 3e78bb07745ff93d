//! Every layout that is read, by small files made in it.

use henson_data::tables::{Column, TableFormat};
use henson_tasks::{Files, FineTuneRecipe, Paths, Reading, Scheme, TASKS, read};

use crate::support::{Place, golden, read_as, shorts, task, written};

#[track_caller]
fn check(name: &str, file: &str, content: &str, expected: &[&str]) {
    let place = Place::new();
    let set = read_as(name, &place.file(file, content)).unwrap();
    assert_eq!(shorts(&set), expected, "{name}, {file}");
    assert_eq!((set.skipped, set.undecided), (0, 0));
}

#[test]
fn glue_in_its_own_layouts() {
    // Only CoLA's test file has a header. Quotes are ordinary characters everywhere, and lines may end with CRLF.
    check(
        "cola",
        "train.tsv",
        "gj04\t1\t\tJim said \"hi.\ngj04\t0\t*\tJim said he \"said\".\n",
        &["0: Jim said \"hi. -> 1 1", "1: Jim said he \"said\". -> 0 0"],
    );
    check("cola", "test.tsv", "index\tsentence\n0\tJim sang.\n1\tHe\n", &["0: Jim sang. -> ?", "1: He -> ?"]);
    check(
        "sst2",
        "train.tsv",
        "sentence\tlabel\r\na frog \t0\r\ngood\t1\r\n",
        &["0: a frog  -> 0 0", "1: good -> 1 1"],
    );
    check("sst2", "test.tsv", "index\tsentence\n0\ta frog\n", &["0: a frog -> ?"]);
    let header = "\u{feff}Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n";
    let expected = &["0: \"A | B\" -> 1 1", "1: C | D -> 0 0"];
    check("mrpc", "msr_paraphrase_train.txt", &format!("{header}1\t7\t8\t\"A\tB\"\n0\t9\t10\tC\tD\n"), expected);
    check("mrpc", "test.tsv", "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n5\t1\t2\tA\tB\n", &["5: A | B -> ?"]);
    let header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2";
    let row = "0\tmain\tMSRvid\t2012test\t0001\tnone\tnone\tA.\tB.";
    check("stsb", "dev.tsv", &format!("{header}\tscore\n{row}\t3.800\n"), &["0: A. | B. -> 3.8"]);
    check("stsb", "test.tsv", &format!("{header}\n{row}\n"), &["0: A. | B. -> ?"]);
    let header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n";
    check("qqp", "train.tsv", &format!("{header}133273\t1\t2\tA?\tB?\t0\n"), &["133273: A? | B? -> 0 0"]);
    check("qqp", "test.tsv", "id\tquestion1\tquestion2\n0\tA?\tB?\n", &["0: A? | B? -> ?"]);
    check(
        "qnli",
        "dev.tsv",
        "index\tquestion\tsentence\tlabel\n3\tA?\tB.\tnot_entailment\n",
        &["3: A? | B. -> 1 not_entailment"],
    );
    check("rte", "dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n", &["0: A | B -> 0 entailment"]);
    check("wnli", "dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n", &["0: A | B -> 1 1"]);
}

#[test]
fn inference_with_its_many_columns() {
    let parses =
        "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2";
    let train = format!("index\tpromptID\tpairID\tgenre\t{parses}\tlabel1\tgold_label\n");
    let row = "0\t31193\t31193n\tgovernment\t( A )\t( B )\t(ROOT A)\t(ROOT B)\tA.\tB.";
    check("mnli", "train.tsv", &format!("{train}{row}\tentailment\tneutral\n"), &["0: A. | B. -> 1 neutral"]);
    let dev = format!("index\tpromptID\tpairID\tgenre\t{parses}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n");
    let row = format!("{row}\tneutral\tneutral\tneutral\tneutral\tneutral\tcontradiction\n");
    check("mnli", "dev_matched.tsv", &format!("{dev}{row}"), &["0: A. | B. -> 2 contradiction"]);
    check("mnli-mismatched", "dev_mismatched.tsv", &format!("{dev}{row}"), &["0: A. | B. -> 2 contradiction"]);

    // SNLI has rows whose annotators disagreed; they are no examples.
    let place = Place::new();
    let object = |label: &str, id: &str| {
        format!(
            "{{\"gold_label\": \"{label}\", \"sentence1\": \"A.\", \"sentence2\": \"B.\", \"pairID\": \"{id}\", \"annotator_labels\": []}}\n"
        )
    };
    let lines = object("entailment", "x#1") + &object("-", "x#2") + &object("contradiction", "x#3");
    let set = read_as("snli", &place.file("snli_1.0_dev.jsonl", lines)).unwrap();
    assert_eq!(shorts(&set), ["x#1: A. | B. -> 0 entailment", "x#3: A. | B. -> 2 contradiction"]);
    assert_eq!((set.undecided, set.skipped), (1, 0));
    let header = "gold_label\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2\tcaptionID\tpairID\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\n";
    let rows = "neutral\t( A )\t( B )\tA\tB\tA.\tB.\t4705552913.jpg#2\tp1\tneutral\t\t\t\t\n-\t( A )\t( B )\tA\tB\tA.\tB.\tc\tp2\tneutral\tentailment\t\t\t\n";
    let set = read_as("snli", &place.file("snli_1.0_dev.txt", format!("{header}{rows}"))).unwrap();
    assert_eq!((shorts(&set), set.undecided), (vec!["p1: A. | B. -> 1 neutral".to_owned()], 1));
}

#[test]
fn typed_tables_of_the_datasets_library() {
    let set = read_as("rte", &golden("rte.parquet")).unwrap();
    assert_eq!(
        shorts(&set),
        ["7: Jim has a frog. | Jim has a pet. -> 0 entailment", "8: It \"is\" green. | It is red. -> 1 not_entailment"]
    );
    assert_eq!(shorts(&read_as("rte", &golden("rte-test.parquet")).unwrap()), ["0: Jim. | Frog. -> ?"]);
    let set = read_as("ner", &golden("tokens.parquet")).unwrap();
    assert_eq!(shorts(&set), ["0: Jim Henson sings (0) -> B-PER I-PER O", "1: É ! (1) -> O O"]);
    let set = read_as("qa", &golden("squad.parquet")).unwrap();
    assert_eq!(shorts(&set), ["a: Who sings? | É, Jim sings. -> [Jim 4..7]", "b: Who dances? | É, Jim sings. -> []"]);
    let set = read_as("choice", &golden("arc.parquet")).unwrap();
    assert_eq!(shorts(&set), ["q: What is green? | a stone / a frog / a cloud -> 1"]);
    // The words of config.json instead of a benchmark's numbers.
    check(
        "sst2",
        "x.jsonl",
        "{\"sentence\": \"a\", \"label\": \"positive\"}\n{\"sentence\": \"b\", \"label\": 0}",
        &["0: a -> 1 1", "1: b -> 0 0"],
    );
}

#[test]
fn numbers_of_the_datasets_library_have_the_names_of_its_schema() {
    let named = |name: &str, file: &str| read_as(name, &golden(file)).unwrap();
    // In the order of their numbers, also those that do not occur.
    let topics = named("classify", "topics-named.parquet");
    assert_eq!(topics.labels, ["sport", "arts", "news"]);
    assert_eq!(shorts(&topics), ["0: a goal -> 0 sport", "1: a song -> 1 arts", "2: a late goal -> 0 sport"]);
    for (name, file) in [("ner", "tags-named"), ("tag", "tags-named"), ("multilabel", "moods-named")] {
        let (parquet, twin) = (named(name, &format!("{file}.parquet")), named(name, &format!("{file}.jsonl")));
        let mut targets = [shorts(&parquet), shorts(&twin)];
        // Labels of lists are in the order of their numbers, which the twin does not know.
        targets.iter_mut().flatten().for_each(|line| *line = line.replace("[joy fear]", "[fear joy]"));
        assert_eq!(targets[0], targets[1], "{name}");
        assert_eq!(parquet.scheme, twin.scheme, "{name}");
        assert_eq!(parquet.scheme.is_some(), name != "multilabel", "{name}");
    }

    // Without names, numbers for tags are no entities: they are refused, unless the labels are given or words are meant.
    let nameless = golden("tags-nameless.parquet");
    for name in ["ner", "tag"] {
        let message = read_as(name, &nameless).unwrap_err().to_string();
        assert!(
            message.contains("tags-nameless.parquet has numbers for tags") && message.contains("--labels"),
            "{message}"
        );
    }
    let labels = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
    let tags = labels(&["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]);
    let given = read(&nameless, &written("ner", Files { labels: tags, ..Files::default() })).unwrap();
    assert_eq!(shorts(&given), shorts(&named("ner", "tags-named.parquet")));
    assert_eq!(given.scheme, Some(Scheme::Bio));
    assert_eq!(shorts(&read_as("pos", &nameless).unwrap())[1], "8: in Leland (1) -> 0 3");

    // A model whose labels are the numbers reads them as it was trained; one with names does not guess what numbers mean.
    let of_model = |name: &str, names: &[&str]| Reading {
        labels_of_model: true,
        ..written(name, Files { labels: labels(names), ..Files::default() })
    };
    let numbers = of_model("ner", &["0", "1", "2", "3", "4"]);
    assert_eq!(shorts(&read(&golden("tags-named.parquet"), &numbers).unwrap())[1], "8: in Leland (1) -> 0 3");
    let numbers = of_model("classify", &["0", "1", "2"]);
    assert_eq!(shorts(&read(&golden("topics-named.parquet"), &numbers).unwrap())[1], "1: a song -> 1 1");
    let names = of_model("ner", &["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]);
    assert!(read(&nameless, &names).unwrap_err().to_string().contains("unknown label \"1\""));
}

#[test]
fn squad_of_both_versions() {
    let set = read_as("squad1", &golden("squad/dev-v1.1.json")).unwrap();
    assert_eq!(set.examples.len(), 40);
    let set = read_as("squad2", &golden("squad/dev-v2.0.json")).unwrap();
    let impossible = shorts(&set).iter().filter(|line| line.ends_with("-> []")).count();
    assert_eq!((set.examples.len(), impossible), (91, 58));
    // Places are counted in characters there, in bytes here.
    let document = |qas: &str| {
        format!(
            r#"{{"version": "v2.0", "data": [{{"title": "T", "paragraphs": [{{"context": "Ä 😀 Jim, né Henson", "qas": [{qas}]}}]}}]}}"#
        )
    };
    check(
        "squad2",
        "dev-v2.0.json",
        &document(
            r#"{"id": "1", "question": "Who?", "is_impossible": false, "answers": [{"text": "Jim", "answer_start": 4}, {"text": "né Henson", "answer_start": 9}]},
               {"id": "2", "question": "Why?", "is_impossible": true, "answers": [], "plausible_answers": [{"text": "Jim", "answer_start": 4}]}"#,
        ),
        &["1: Who? | Ä 😀 Jim, né Henson -> [Jim 8..11, né Henson 13..23]", "2: Why? | Ä 😀 Jim, né Henson -> []"],
    );
    check(
        "squad1",
        "test.json",
        &document(r#"{"id": "1", "question": "Who?"}"#),
        &["1: Who? | Ä 😀 Jim, né Henson -> ?"],
    );
    check(
        "qa",
        "dev.jsonl",
        "{\"id\": 5, \"question\": \"Who?\", \"context\": \"Jim.\", \"answers\": [{\"text\": \"Jim\", \"answer_start\": 0}]}\n",
        &["5: Who? | Jim. -> [Jim 0..3]"],
    );
}

#[test]
fn columns_in_every_scheme() {
    let place = Place::new();
    let conll = "-DOCSTART- -X- -X- O\n\nJim NNP I-NP I-PER\nHenson NNP I-NP I-PER\n# SYM O O\n\n-DOCSTART- -X- -X- O\n\nRhine NNP I-NP I-LOC\nBonn NNP I-NP B-LOC\n";
    let set = read_as("ner", &place.file("eng.train", conll)).unwrap();
    assert_eq!(shorts(&set), ["0: Jim Henson # (0) -> B-PER I-PER O", "1: Rhine Bonn (1) -> B-LOC B-LOC"]);
    assert_eq!((set.scheme, set.labels.join(" ")), (Some(Scheme::Iob1), "B-LOC B-PER I-LOC I-PER O".to_owned()));

    let bioes = "a\tB-X\nb\tE-X\n\u{a0}c d\tS-Y\n";
    let set = read_as("ner", &place.file("x.conll", bioes)).unwrap();
    assert_eq!(shorts(&set), ["0: a b \u{a0}c d (0) -> B-X I-X B-Y"]);
    assert_eq!((set.scheme, set.label_counts()), (Some(Scheme::Bioes), vec![1, 1, 1, 0, 0]));
    // As a model with these labels wants them.
    let labels = ["O", "S-Y", "B-X", "I-X", "E-X"].map(str::to_owned).into();
    let reading = written("ner", Files { labels, ..Files::default() });
    let set = read(&place.file("y.conll", "a B-X\nb I-X\nc B-Y \n"), &reading).unwrap();
    assert_eq!(shorts(&set), ["0: a b c (0) -> B-X E-X S-Y"]);

    // A no-break space is part of a word.
    check("ner", "n.conll", "1\u{a0}000 O\n", &["0: 1\u{a0}000 (0) -> O"]);

    // Other columns, and none.
    let (text_column, label_column) = (Some(Column::Number(0)), vec![Column::Number(1)]);
    let files = Files { text_column, label_column, ..Files::default() };
    let set = read(&place.file("z.txt", conll), &written("pos", files)).unwrap();
    assert_eq!((set.labels.join(" "), set.scheme), ("NNP SYM".to_owned(), None));
    check("ner", "test.txt", "Jim\nsings\n\nFrogs\n", &["0: Jim sings (0) -> ?", "1: Frogs (0) -> ?"]);
    check("tag", "x.jsonl", "{\"words\": [\"a\", \"b\"], \"tags\": [\"X\", \"Y\"]}\n", &["0: a b (0) -> X Y"]);
}

#[test]
fn universal_dependencies_without_ranges_and_empty_nodes() {
    let row = |id: &str, form: &str, tag: &str| format!("{id}\t{form}\t_\t{tag}\t_\t_\t_\t_\t_\t_\n");
    let text = format!(
        "# newdoc id = a\n# text = don't # 1 000\n{}{}{}{}{}{}\n# newdoc id = b\n{}\n",
        row("1-2", "don't", "_"),
        row("1", "do", "AUX"),
        row("2", "n't", "PART"),
        row("3", "#", "SYM"),
        row("3.1", "is", "AUX"),
        row("4", "1 000", "NUM"),
        row("1", "Yes", "INTJ")
    );
    check("pos", "en_x-ud-dev.conllu", &text, &["0: do n't # 1 000 (0) -> AUX PART SYM NUM", "1: Yes (1) -> INTJ"]);
}

#[test]
fn choices_in_several_layouts() {
    let swag = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n\
                0,anet_1,3416,\"Jim sits. He\",Jim sits.,He,gold,sings.,\"eats, then sleeps.\",flies.,melts.,1\n";
    check("swag", "val.csv", swag, &["0: Jim sits. | He sings. / He eats, then sleeps. / He flies. / He melts. -> 1"]);
    let swag = swag.replace(",label\n", "\n").replace("melts.,1", "melts.");
    check(
        "swag",
        "test.csv",
        &swag,
        &["0: Jim sits. | He sings. / He eats, then sleeps. / He flies. / He melts. -> ?"],
    );
    let arc = "question,A,B,C,D,answer\n\"Which is \"\"green\"\",\nand why?\",frog,stone,sky,,A\n";
    check("choice", "arc.csv", arc, &["0: Which is \"green\",\nand why? | frog / stone / sky -> 0"]);
    check(
        "choice",
        "x.jsonl",
        "{\"context\": \"Jim\", \"endings\": [\"sings\", \"flies\"], \"label\": 1}\n",
        &["0: Jim | sings / flies -> 1"],
    );
}

#[test]
fn what_users_bring() {
    check("classify", "x.csv", "text,label\n\"a, b\",yes\nc,no\n", &["0: a, b -> 1 yes", "1: c -> 0 no"]);
    // Labels that are numbers are sorted as such.
    check("classify", "x.tsv", "text\tlabel\na\t10\nb\t9\n", &["0: a -> 1 10", "1: b -> 0 9"]);
    check("pair", "x.tsv", "question\tsentence\tlabel\nA?\tB.\tx\n", &["0: A? | B. -> 0 x"]);
    check("regress", "x.jsonl", "{\"text\": \"a\", \"score\": -1.5e1}\n", &["0: a -> -15"]);
    check("regress", "x.tsv", "sentence1\tsentence2\tscore\na\tb\t1\n", &["0: a | b -> 1"]);
    check("multilabel", "x.tsv", "text\tlabels\na\tjoy, fear\nb\t\n", &["0: a -> [fear joy]", "1: b -> []"]);
    check("multilabel", "x.jsonl", "{\"text\": \"a\", \"labels\": [\"y\", \"x\"]}\n", &["0: a -> [x y]"]);

    let place = Place::new();
    let path = place.file("toxic.csv", "id,comment,toxic,insult\nk,a,1,0\nl,b,1,1\nm,c,0,0\n");
    let name = |name: &str| Column::Name(name.to_owned());
    let label_column = vec![name("toxic"), name("insult")];
    let files = Files { text_column: Some(name("comment")), label_column, ..Files::default() };
    let set = read(&path, &written("multilabel", files)).unwrap();
    assert_eq!(shorts(&set), ["k: a -> [toxic]", "l: b -> [insult toxic]", "m: c -> []"]);

    // Without a header, by numbers; quoted tabs; a name that says nothing.
    let path = place.file("notes", "x\t\"a\tb\"\ny\tc\n");
    let files = Files {
        text_column: Some(Column::Number(1)),
        label_column: vec![Column::Number(0)],
        header: Some(false),
        quotes: Some(true),
        ..Files::default()
    };
    assert_eq!(shorts(&read(&path, &written("classify", files)).unwrap()), ["0: a\tb -> 0 x", "1: c -> 1 y"]);
}

#[test]
fn compressed_files_are_known_by_their_bytes() {
    use std::io::Write;
    let place = Place::new();
    let text = "text\tlabel\na\tx\n";
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(text.as_bytes()).unwrap();
    let files = [
        place.file("a.tsv", text),
        place.file("b.tsv.gz", gzip.finish().unwrap()),
        place.file("c.tsv", zstd::encode_all(text.as_bytes(), 0).unwrap()),
    ];
    for path in files {
        assert_eq!(shorts(&read_as("classify", &path).unwrap()), ["0: a -> 0 x"], "{path:?}");
    }
}

#[test]
fn every_task_has_a_name_that_finds_it() {
    for known in &TASKS {
        assert_eq!(task(known.name), known);
    }
}

#[test]
fn json_arrays() {
    let array = "[\n  {\"text\": \"a\", \"label\": \"x\"},\n  {\"text\": \"b\",\n   \"label\": \"y\"}\n]\n";
    check("classify", "x.json", array, &["0: a -> 0 x", "1: b -> 1 y"]);
    check(
        "classify",
        "x.json",
        "[{\"text\": \"a\", \"label\": \"x\"}, {\"text\": \"b\", \"label\": \"y\"}]",
        &["0: a -> 0 x", "1: b -> 1 y"],
    );
    check("tag", "x.json", "[{\"tokens\": [\"a\", \"b\"], \"tags\": [\"O\", \"B-X\"]}]", &["0: a b (0) -> O B-X"]);
    let question = "[{\"id\": \"q\", \"question\": \"who?\", \"context\": \"Jim sat\", \"answers\": {\"text\": [\"Jim\"], \"answer_start\": [0]}}]";
    check("qa", "x.json", question, &["q: who? | Jim sat -> [Jim 0..3]"]);
}

#[test]
fn lines_of_fasttext() {
    let lines = "__label__sad the end\n\n__label__glad  a song __label__is sung\n";
    let expected = ["0: the end -> 1 sad", "1: a song __label__is sung -> 0 glad"];
    for name in ["train.txt", "cooking.train"] {
        check("classify", name, lines, &expected);
    }
    let several = "__label__b __label__a one\n__label__b two\n";
    check("multilabel", "x.txt", several, &["0: one -> [a b]", "1: two -> [b]"]);
    // Without labels they are texts alone; only the flag can say so.
    let place = Place::new();
    let path = place.file("x.txt", "one\ntwo\n");
    let files = Files { format: Some(TableFormat::FastText), ..Files::default() };
    assert_eq!(shorts(&read(&path, &written("classify", files)).unwrap()), ["0: one -> ?", "1: two -> ?"]);
}

#[test]
fn spans_of_annotation_tools() {
    let text = "Zoë Müller, of Berlin.";
    let expected = ["0: Zoë Müller , of Berlin . (0) -> B-PER I-PER O O B-LOC O", "1: Hm (1) -> O"];
    let prodigy = format!(
        "{{\"text\": {text:?}, \"spans\": [{{\"start\": 0, \"end\": 10, \"label\": \"PER\"}}, {{\"start\": 15, \"end\": 21, \"label\": \"LOC\"}}], \
         \"answer\": \"accept\"}}\n{{\"text\": \"Hm\", \"tokens\": [{{\"text\": \"Hm\", \"start\": 0, \"end\": 2}}], \"answer\": \"accept\"}}\n\
         {{\"text\": \"Oh\", \"spans\": [], \"answer\": \"reject\"}}\n"
    );
    let place = Place::new();
    let set = read_as("ner", &place.file("prodigy.jsonl", prodigy)).unwrap();
    assert_eq!((shorts(&set), set.undecided), (expected.map(str::to_owned).to_vec(), 1));
    for key in ["label", "labels"] {
        let doccano = format!(
            "{{\"id\": 0, \"text\": {text:?}, {key:?}: [[15, 21, \"LOC\"], [0, 11, \"PER\"]]}}\n{{\"id\": 1, \"text\": \"Hm\", {key:?}: []}}\n"
        )
        .replace("[0, 11", "[0, 10");
        check("ner", "doccano.jsonl", &doccano, &expected);
    }
    let entities = "[{\"id\": 7, \"label\": \"PER\", \"start_offset\": 0, \"end_offset\": 10}, \
                    {\"id\": 8, \"label\": \"LOC\", \"start_offset\": 14, \"end_offset\": 21}]";
    // White space at the ends of a span is not part of it.
    let doccano = format!(
        "{{\"text\": {text:?}, \"entities\": {entities}, \"relations\": []}}\n{{\"text\": \"Hm\", \"entities\": []}}\n"
    );
    check("ner", "doccano.jsonl", &doccano, &expected);
    let pairs = format!(
        "[[{text:?}, {{\"entities\": [[0, 10, \"PER\"], [15, 21, \"LOC\"]]}}],\n [\"Hm\", {{\"entities\": []}}]]"
    );
    check("ner", "spacy.json", &pairs, &expected);
    let document = "[{\"id\": 5, \"paragraphs\": [{\"raw\": \"A b c d\", \"sentences\": [\
        {\"tokens\": [{\"orth\": \"A\", \"ner\": \"B-X\"}, {\"orth\": \"b\", \"ner\": \"L-X\"}]},\
        {\"tokens\": [{\"orth\": \"c\", \"ner\": \"O\"}, {\"orth\": \"d\", \"ner\": \"U-Y\"}]}]}]}]";
    check("ner", "spacy.json", document, &["5: A b (0) -> B-X I-X", "5: c d (0) -> O B-Y"]);
    // The words are the file's own where it has them.
    let own = "{\"text\": \"co-op 7kg\", \"tokens\": [{\"start\": 0, \"end\": 2}, {\"start\": 3, \"end\": 5}, {\"start\": 6, \"end\": 7}, \
               {\"start\": 7, \"end\": 9}], \"spans\": [{\"start\": 6, \"end\": 7, \"label\": \"NUM\"}]}\n";
    check("ner", "x.jsonl", own, &["0: co op 7 kg (0) -> O O B-NUM O"]);
    // A text without annotations is something to predict; a list of words is what it was.
    check("ner", "x.jsonl", "{\"text\": \"Hm, no.\"}\n", &["0: Hm , no . (0) -> ?"]);
    let lists = "{\"text\": \"a b\", \"tokens\": [\"a\", \"b\"], \"labels\": [\"O\", \"B-X\"]}\n";
    check("ner", "x.jsonl", lists, &["0: a b (0) -> O B-X"]);
}

#[test]
fn several_files_are_one_set() {
    let place = Place::new();
    let first = place.file("part-1.csv", "text,label\na,x\nb,z\n");
    place.file("part-2.csv", "text,label\nc,y\n");
    place.file("other.csv", "text,label\nd,w\n");
    let pattern = first.with_file_name("part-*.csv").display().to_string();
    let recipe = |names: &[&str]| FineTuneRecipe {
        task: "classify".to_owned(),
        train: Paths(names.iter().map(|name| (*name).to_owned()).collect()),
        ..FineTuneRecipe::default()
    };
    let toml = recipe(&[&pattern, "more.csv"]).to_toml().unwrap();
    assert!(toml.contains("more.csv\",\n]") || toml.contains("more.csv\"]"), "{toml}");
    assert!(recipe(&["one.csv"]).to_toml().unwrap().contains("train = \"one.csv\""));
    let names: Vec<String> = Paths::from(pattern.as_str())
        .find()
        .unwrap()
        .iter()
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, ["part-1.csv", "part-2.csv"]);
    let message = Paths::from(first.with_file_name("none-*.csv").display().to_string()).find().unwrap_err().to_string();
    assert!(message.contains("none-*.csv"), "{message}");
}
