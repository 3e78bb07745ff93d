//! Conditional random fields: loss, gradients, probabilities and the best labels, against all labellings.

use half::bf16;
use henson_kernels::cpu::crf::{Field, reference};
use henson_kernels::cuda::crf as kernels;
use henson_kernels::cuda::{CudaError, DType, Result};

use crate::check::{Checks, Number, TOLERANCE_F32, bits, exact, indices, numbers};

pub(crate) fn crf(checks: &mut Checks<'_>) -> Result<()> {
    // Few labels and short sequences, because all labellings are gone through; more labels than lanes with the shortest.
    for (k, lengths) in
        [(1, vec![1, 3]), (2, vec![5, 1, 9, 3]), (5, vec![4, 1, 2, 5]), (17, vec![2, 3, 1]), (150, vec![1, 2])]
    {
        check::<f32>(checks, k, &lengths)?;
        check::<bf16>(checks, k, &lengths)?;
    }
    long(checks)?;
    outside(checks)
}

/// Numbers of a field.
struct Data<E> {
    logits: Vec<E>,
    field: [Vec<f32>; 3],
    labels: Vec<u32>,
    offsets: Vec<u32>,
}

impl<E: Number> Data<E> {
    /// With five tokens that fill the batch up.
    fn new(k: usize, lengths: &[usize]) -> Self {
        let mut offsets = vec![0];
        lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + *length as u32));
        let tokens = *offsets.last().unwrap() as usize + 5;
        Self {
            logits: numbers(1, tokens * k),
            field: [numbers(2, k), numbers(3, k), numbers(4, k * k)],
            labels: indices(5, tokens, k),
            offsets,
        }
    }
}

fn check<E: Number>(checks: &mut Checks<'_>, k: usize, lengths: &[usize]) -> Result<()> {
    let data = Data::<E>::new(k, lengths);
    let (what, n) = (format!("field of {k} labels over {lengths:?}"), data.logits.len());
    let logits = exact(&data.logits);
    let wide = data.field.each_ref().map(|x| exact(x));
    let field = Field { start: &wide[0], end: &wide[1], transitions: &wide[2] };
    // Which steps are legal: about two of three, and no label at all may end a sequence.
    let mut legal = indices(6, k * (k + 2), 3).iter().map(|x| u32::from(*x > 0)).collect::<Vec<_>>();
    legal[k..2 * k].fill(0);
    let illegal = |labels: &[u32]| {
        let steps = labels.windows(2).filter(|two| legal[2 * k + two[0] as usize * k + two[1] as usize] == 0).count();
        steps + usize::from(legal[labels[0] as usize] == 0) + 1
    };
    let scale = 0.25;
    let mut loss = 0.0;
    let mut expected = [vec![0.0; n], vec![0.0; k], vec![0.0; k], vec![0.0; k * k]];
    let (mut shares, mut first) = (vec![0.0; n], [Vec::new(), Vec::new()]);
    for ends in data.offsets.windows(2) {
        let (start, end) = (ends[0] as usize, ends[1] as usize);
        let (own, right) = (&logits[start * k..end * k], &data.labels[start..end]);
        let (own_loss, gradients) = reference::loss(&field, own, right);
        loss += scale * own_loss;
        for (i, (to, from)) in expected.iter_mut().zip(&gradients).enumerate() {
            let at = if i == 0 { start * k } else { 0 };
            to[at..].iter_mut().zip(from).for_each(|(to, x)| *to += scale * x);
        }
        for (at, x) in gradients[0].iter().enumerate() {
            shares[start * k + at] = x + f64::from(u8::from(right[at / k] as usize == at % k));
        }
        let labellings = reference::labellings(&field, own);
        for (penalty, best) in [0.0, 1e9].into_iter().zip(&mut first) {
            let score = |(labels, score): &(Vec<u32>, f64)| score - penalty * illegal(labels) as f64;
            let found = labellings.iter().max_by(|a, b| score(a).total_cmp(&score(b))).unwrap();
            best.extend(&found.0);
        }
    }

    let (offsets, labels, legal) = (checks.up(&data.offsets)?, checks.up(&data.labels)?, checks.up(&legal)?);
    let on_gpu = [checks.up(&data.field[0])?, checks.up(&data.field[1])?, checks.up(&data.field[2])?];
    let field = kernels::Field { start: on_gpu[0].view(), end: on_gpu[1].view(), transitions: on_gpu[2].view() };
    let mut run = || -> Result<Vec<u32>> {
        let (x, total) = (checks.out(&data.logits)?, checks.poisoned::<f32>(1)?);
        let to = [checks.poisoned::<f32>(k)?, checks.poisoned::<f32>(k)?, checks.poisoned::<f32>(k * k)?];
        let gradients = kernels::Field { start: to[0].view(), end: to[1].view(), transitions: to[2].view() };
        let (gpu, offsets, labels) = (checks.gpu, offsets.view(), labels.view());
        kernels::loss(gpu, &field, x.view(), offsets, labels, scale as f32, Some(&gradients), total.view())?;
        checks.within::<f32>(&format!("loss of {what}"), &total, &[loss], TOLERANCE_F32)?;
        checks.close::<E>(&format!("logits' gradient of {what}"), &x, &expected[0])?;
        for (name, to, expected) in
            [("start", &to[0], &expected[1]), ("end", &to[1], &expected[2]), ("transitions", &to[2], &expected[3])]
        {
            checks.within::<f32>(&format!("{name} of {what}"), to, expected, TOLERANCE_F32)?;
        }
        Ok([bits::<E>(checks.gpu, &x)?, bits::<f32>(checks.gpu, &to[2])?].concat())
    };
    let same = run()? == run()?;
    checks.verify(|| format!("two runs of {what} differ"), same);

    let (x, out, total) = (checks.up(&data.logits)?, checks.poisoned::<f32>(n)?, checks.poisoned::<f32>(1)?);
    let (gpu, offsets, labels) = (checks.gpu, offsets.view(), labels.view());
    kernels::loss(gpu, &field, x.view(), offsets, labels, scale as f32, None, total.view())?;
    checks.within::<f32>(&format!("loss alone of {what}"), &total, &[loss], TOLERANCE_F32)?;
    let kept = checks.gpu.read::<E>(x.view())? == data.logits;
    checks.verify(|| format!("{what}: the logits are kept without gradients"), kept);
    kernels::probabilities(checks.gpu, &field, x.view(), offsets, out.view())?;
    checks.within::<f32>(&format!("probabilities of {what}"), &out, &shares, TOLERANCE_F32)?;
    for (legal, expected) in [None, Some(legal.view())].into_iter().zip(&first) {
        let out = checks.up(&vec![77u32; n / k])?;
        kernels::best(checks.gpu, &field, legal, x.view(), offsets, out.view())?;
        let got = checks.gpu.read::<u32>(out.view())?;
        let good = got[..expected.len()] == expected[..] && got[expected.len()..].iter().all(|label| *label == 77);
        checks.verify(|| format!("best labels of {what}, {}: {got:?} for {expected:?}", legal.is_some()), good);
    }
    Ok(())
}

/// As the CPU does it, where labellings are too many; equal scores give the first label.
fn long(checks: &mut Checks<'_>) -> Result<()> {
    use henson_kernels::cpu::{Cpu, Isa, crf as on_cpu};
    let (k, lengths) = (9, [300, 7, 64, 1]);
    let data = Data::<f32>::new(k, &lengths);
    let tokens = *data.offsets.last().unwrap() as usize;
    // Numbers that repeat.
    let logits: Vec<f32> = data.logits.iter().map(|x| x.round()).collect();
    let steps: Vec<f32> = data.field[2].iter().map(|x| x.round()).collect();
    let cpu = Cpu::new(Isa::Portable, 1).unwrap();
    let field = on_cpu::Field { start: &data.field[0], end: &data.field[1], transitions: &steps };
    let (mut best, mut shares) = (vec![0; tokens], vec![0.0; tokens * k]);
    let own = &logits[..tokens * k];
    on_cpu::best(&cpu, &field, None, own, &data.offsets, &mut best);
    on_cpu::probabilities(&cpu, &field, own, &data.offsets, &mut shares);
    let (x, offsets) = (checks.up(own)?, checks.up(&data.offsets)?);
    let on_gpu = [checks.up(&data.field[0])?, checks.up(&data.field[1])?, checks.up(&steps)?];
    let field = kernels::Field { start: on_gpu[0].view(), end: on_gpu[1].view(), transitions: on_gpu[2].view() };
    let (labels, out) = (checks.up(&vec![0u32; tokens])?, checks.poisoned::<f32>(tokens * k)?);
    kernels::best(checks.gpu, &field, None, x.view(), offsets.view(), labels.view())?;
    let got = checks.gpu.read::<u32>(labels.view())?;
    checks.verify(|| "best labels of a long sequence".to_owned(), got == best);
    kernels::probabilities(checks.gpu, &field, x.view(), offsets.view(), out.view())?;
    checks.within::<f32>("probabilities of a long sequence", &out, &exact(&shares), TOLERANCE_F32)
}

/// A label outside of the field is a fault, and the loss is none.
fn outside(checks: &mut Checks<'_>) -> Result<()> {
    let mut data = Data::<f32>::new(3, &[4]);
    data.labels[2] = 3;
    let (x, offsets, labels) = (checks.up(&data.logits)?, checks.up(&data.offsets)?, checks.up(&data.labels)?);
    let on_gpu = [checks.up(&data.field[0])?, checks.up(&data.field[1])?, checks.up(&data.field[2])?];
    let field = kernels::Field { start: on_gpu[0].view(), end: on_gpu[1].view(), transitions: on_gpu[2].view() };
    let total = checks.gpu.empty(1, DType::F32)?;
    kernels::loss(checks.gpu, &field, x.view(), offsets.view(), labels.view(), 1.0, None, total.view())?;
    let loss = checks.gpu.read::<f32>(total.view())?[0];
    let fault = checks.gpu.check_faults();
    let noticed = matches!(fault, Err(CudaError::Index { operation: "crf" }));
    checks.verify(|| format!("a label outside of the field: {loss}, {fault:?}"), loss.is_nan() && noticed);
    Ok(())
}
