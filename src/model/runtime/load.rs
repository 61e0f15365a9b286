//! From named tensors to quantised weights.

use candle_core::Device;

use super::{Layer, Linear, Norm, QMatrix, QRows, RuntimeError};
use crate::hub::Weights;
use crate::model::{ModelConfig, NormKind};

impl Linear {
    /// `x·Wᵀ + b` for quantised rows, into `out` as `(rows, out)`.
    pub(super) fn apply(&self, rows: &QRows, out: &mut [f32], scratch: &mut Vec<f32>) {
        self.weight.matmul(rows, out, scratch);
        if let Some(bias) = &self.bias {
            for row in out.chunks_mut(bias.len()) {
                crate::model::kernels::add_scaled(row, 1.0, bias);
            }
        }
    }
}

/// Reads one model's tensors.
pub(super) struct Loader<'a> {
    pub config: &'a ModelConfig,
    pub weights: &'a Weights,
}

impl Loader<'_> {
    pub(super) fn layer(&self, index: usize) -> Result<Layer, RuntimeError> {
        let config = self.config;
        let (d, f) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.query_size(), config.key_value_size());
        let anatomy = &config.anatomy;
        let p = |name: &str| format!("model.layers.{index}.{name}");
        let norm = |name: &str| self.norm(&p(name), d);
        let post = |name: &str| -> Result<Option<Norm>, RuntimeError> {
            if anatomy.post_norms { norm(name).map(Some) } else { Ok(None) }
        };
        let qk_norm = if anatomy.qk_norm {
            let gain = |name: &str| self.norm(&p(name), config.head_dim).map(|norm| norm.gain);
            Some((gain("self_attn.q_norm")?, gain("self_attn.k_norm")?))
        } else {
            None
        };
        let mlp_norm = if anatomy.post_norms {
            "pre_feedforward_layernorm"
        } else {
            "post_attention_layernorm"
        };
        let qkv =
            [(p("self_attn.q_proj"), q), (p("self_attn.k_proj"), kv), (p("self_attn.v_proj"), kv)];
        Ok(Layer {
            input_layernorm: norm("input_layernorm")?,
            qkv_proj: self.stack(&qkv, d, anatomy.qkv_bias)?,
            qk_norm,
            o_proj: self.stack(&[(p("self_attn.o_proj"), d)], q, anatomy.o_bias)?,
            attention_postnorm: post("post_attention_layernorm")?,
            mlp_norm: norm(mlp_norm)?,
            gate_up_proj: self.stack(
                &[(p("mlp.gate_proj"), f), (p("mlp.up_proj"), f)],
                d,
                anatomy.mlp_bias,
            )?,
            down_proj: self.stack(&[(p("mlp.down_proj"), d)], f, anatomy.mlp_bias)?,
            mlp_postnorm: post("post_feedforward_layernorm")?,
            window: anatomy.windows.get(index).copied().flatten(),
        })
    }

    /// Projections that read the same input, one under the other.
    fn stack(
        &self,
        parts: &[(String, usize)],
        width: usize,
        bias: bool,
    ) -> Result<Linear, RuntimeError> {
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (name, rows) in parts {
            weights.extend(read(self.weights, &format!("{name}.weight"), &[*rows, width])?);
            if bias {
                biases.extend(read(self.weights, &format!("{name}.bias"), &[*rows])?);
            }
        }
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        let weight = QMatrix::new(&weights, rows, width);
        Ok(Linear { weight, bias: bias.then_some(biases) })
    }

    pub(super) fn norm(&self, name: &str, width: usize) -> Result<Norm, RuntimeError> {
        let mut gain = read(self.weights, &format!("{name}.weight"), &[width])?;
        let kind = self.config.anatomy.norm;
        if kind == NormKind::RmsOffset {
            gain.iter_mut().for_each(|gain| *gain += 1.0);
        }
        let bias = if kind == NormKind::Layer && width == self.config.hidden_size {
            Some(read(self.weights, &format!("{name}.bias"), &[width])?)
        } else {
            None
        };
        Ok(Norm { gain, bias })
    }
}

/// One tensor as f32, checked.
pub(super) fn read(
    weights: &Weights,
    name: &str,
    shape: &[usize],
) -> Result<Vec<f32>, RuntimeError> {
    let tensor = weights.tensor(name, &Device::Cpu)?;
    if tensor.dims() != shape {
        return Err(RuntimeError::Shape {
            name: name.into(),
            expected: shape.to_vec(),
            got: tensor.dims().to_vec(),
        });
    }
    let values = tensor
        .flatten_all()
        .and_then(|flat| flat.to_vec1::<f32>())
        .map_err(|source| RuntimeError::Tensor { name: name.into(), source })?;
    if values.iter().any(|value| !value.is_finite()) {
        return Err(RuntimeError::NotFinite { name: name.into() });
    }
    Ok(values)
}
