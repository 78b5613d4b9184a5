"""What each of vLLM's modules reads of a step's sliding-window metadata: fields and methods, by module.

The metadata objects of this package have every one of them. That the list is complete is checked against the source of
the supported release, where it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping

READ_BY: Mapping[str, str] = {
    "vllm.models.deepseek_v4.amd.mono_decode": (
        "block_size decode_swa_indices decode_swa_lens decode_swa_width num_decode_tokens num_decodes num_prefills "
        "slot_mapping token_to_req_indices"
    ),
    "vllm.models.deepseek_v4.amd.rocm": (
        "block_size block_table decode_swa_indices decode_swa_lens decode_swa_ragged_indices "
        "decode_swa_ragged_indptr get_prefill_chunk_plan is_valid_token num_decode_tokens num_decodes "
        "num_prefill_tokens num_prefills prefill_gather_lens prefill_left_visible prefill_right_visible "
        "prefill_seq_lens prefill_swa_ragged_indices prefill_swa_ragged_indptr query_start_loc query_start_loc_cpu "
        "seq_lens token_to_req_indices"
    ),
    "vllm.models.deepseek_v4.attention": ("block_size slot_mapping"),
    "vllm.models.deepseek_v4.cpu.cpu_sparse": ("block_size block_table slot_mapping token_to_req_indices"),
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse": (
        "block_size block_table decode_swa_indices decode_swa_lens decode_swa_width flashinfer_sparse_index_cache "
        "is_valid_token max_decode_query_len num_decode_tokens num_decodes num_prefill_tokens num_prefills "
        "prefill_left_visible prefill_right_visible prefill_swa_indices prefill_swa_lens query_start_loc "
        "query_start_loc_cpu seq_lens token_to_req_indices"
    ),
    "vllm.models.deepseek_v4.nvidia.flashmla": (
        "block_size block_table decode_swa_indices decode_swa_lens get_prefill_chunk_plan is_valid_token "
        "num_decode_tokens num_decodes num_prefill_tokens num_prefills prefill_gather_lens prefill_left_visible "
        "prefill_right_visible prefill_seq_lens query_start_loc query_start_loc_cpu tile_sched_c128a tile_sched_c4a "
        "tile_sched_swaonly token_to_req_indices"
    ),
    "vllm.models.deepseek_v41.amd.model": ("block_table num_decodes num_prefills query_start_loc slot_mapping"),
    "vllm.models.deepseek_v41.amd.mono_decode": (
        "block_size decode_swa_indices decode_swa_lens decode_swa_width num_decode_tokens num_decodes num_prefills "
        "slot_mapping token_to_req_indices"
    ),
    "vllm.models.deepseek_v41.amd.rocm": (
        "block_size block_table decode_swa_indices decode_swa_lens decode_swa_ragged_indices "
        "decode_swa_ragged_indptr get_prefill_chunk_plan is_valid_token num_decode_tokens num_decodes "
        "num_prefill_tokens num_prefills prefill_gather_lens prefill_seq_lens prefill_seq_lens_cpu "
        "prefill_swa_ragged_indices prefill_swa_ragged_indptr query_start_loc query_start_loc_cpu seq_lens "
        "token_to_req_indices"
    ),
    "vllm.models.deepseek_v41.attention": ("block_size cache_positions cache_slot_mapping slot_mapping"),
    "vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn": (
        "block_size block_table decode_swa_indices decode_swa_lens get_prefill_chunk_plan is_valid_token "
        "num_decode_tokens num_decodes num_prefill_tokens num_prefills prefill_gather_lens prefill_seq_lens "
        "query_start_loc query_start_loc_cpu token_to_req_indices"
    ),
    "vllm.models.deepseek_v41.nvidia.flashinfer_sparse": (
        "block_size block_table decode_swa_indices decode_swa_lens decode_swa_width flashinfer_decode_seq_lens "
        "flashinfer_decode_topk_lens flashinfer_sparse_index_cache is_valid_token max_decode_query_len "
        "num_decode_tokens num_decodes num_prefill_tokens num_prefills prefill_swa_indices prefill_swa_lens "
        "query_start_loc query_start_loc_cpu replay_start seq_lens token_to_req_indices"
    ),
    "vllm.models.deepseek_v41.nvidia.flashmla": (
        "block_size block_table decode_swa_indices decode_swa_lens get_prefill_chunk_plan is_valid_token "
        "num_decode_tokens num_decodes num_prefill_tokens prefill_gather_lens prefill_seq_lens query_start_loc "
        "query_start_loc_cpu tile_sched_c1a tile_sched_c2a tile_sched_swaonly token_to_req_indices"
    ),
    "vllm.models.deepseek_v41.nvidia.model": ("block_table num_decodes num_prefills query_start_loc slot_mapping"),
    "vllm.models.deepseek_v41.nvidia.specialized_decode.attention.sparse_mla": (
        "decode_swa_width flashinfer_decode_seq_lens flashinfer_decode_topk_lens max_decode_query_len "
        "num_decode_tokens num_decodes num_prefills query_start_loc seq_lens"
    ),
    "vllm.models.deepseek_v41.nvidia.specialized_decode.runtime.decode": ("num_prefills"),
    "vllm.v1.attention.backends.mla.sparse_swa": (
        "block_table decode_swa_indices decode_swa_lens flashinfer_sparse_index_cache is_valid_token "
        "num_decode_tokens query_start_loc replay_start seq_lens slot_mapping tile_sched_c128a tile_sched_c1a "
        "tile_sched_c2a tile_sched_c4a tile_sched_swaonly token_to_req_indices"
    ),
}
