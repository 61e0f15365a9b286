//! Tensor names: llama.cpp's to Hugging Face's.

/// Divisors of the rotary frequencies; configuration rather than weights.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The Hugging Face name of a tensor; names that are not known stay as they are, so that a message
/// about them can quote the file. `post_norms`: the family norms what attention and MLP give.
pub(super) fn hugging_face_name(name: &str, post_norms: bool) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".to_string(),
        "output_norm.weight" => return "model.norm.weight".to_string(),
        "output_norm.bias" => return "model.norm.bias".to_string(),
        "output.weight" => return "lm_head.weight".to_string(),
        _ => {}
    }
    layer_name(name, post_norms).unwrap_or_else(|| name.to_string())
}

fn layer_name(name: &str, post_norms: bool) -> Option<String> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (part, kind) = rest.split_once('.')?;
    let part = match part {
        "attn_norm" => "input_layernorm",
        "ffn_norm" if post_norms => "pre_feedforward_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "post_attention_norm" if post_norms => "post_attention_layernorm",
        "post_ffw_norm" if post_norms => "post_feedforward_layernorm",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    matches!(kind, "weight" | "bias").then(|| format!("model.layers.{layer}.{part}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::hugging_face_name;

    #[test]
    fn every_part_of_a_layer_has_its_name() {
        let cases = [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
            ("blk.12.attn_output.weight", "model.layers.12.self_attn.o_proj.weight"),
            ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
            ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
            ("blk.x.ffn_norm.weight", "blk.x.ffn_norm.weight"),
            ("blk.3.ffn_gate_exps.weight", "blk.3.ffn_gate_exps.weight"),
            ("blk.3.attn_q.bias", "model.layers.3.self_attn.q_proj.bias"),
            ("blk.3.attn_k_norm.weight", "model.layers.3.self_attn.k_norm.weight"),
            ("output_norm.bias", "model.norm.bias"),
            ("blk.3.post_ffw_norm.weight", "blk.3.post_ffw_norm.weight"),
        ];
        for (ggml, expected) in cases {
            assert_eq!(hugging_face_name(ggml, false), expected);
        }
        for (ggml, expected) in [
            ("blk.3.ffn_norm.weight", "model.layers.3.pre_feedforward_layernorm.weight"),
            ("blk.3.post_attention_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
            ("blk.3.post_ffw_norm.weight", "model.layers.3.post_feedforward_layernorm.weight"),
        ] {
            assert_eq!(hugging_face_name(ggml, true), expected);
        }
    }
}
