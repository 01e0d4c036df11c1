import torch


class RMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        r = torch.linalg.vecdot(x, x).mul_(1 / x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, w, r)
        return (x * r).mul_(w)

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        xh = x * r
        n = x.shape[-1]
        gx = g * xh
        dw = gx.reshape(-1, n).sum(0)
        c = (gx @ w).mul_(-1 / n).unsqueeze(-1) if gx.dim() > 1 else None
        dx = torch.addcmul(g * w, xh, c).mul_(r)
        return dx, dw, None


def patch():
    from transformers.models.qwen3_moe import modeling_qwen3_moe as M

    def fwd(self, x):
        return RMS.apply(x, self.weight, self.variance_epsilon)

    M.Qwen3MoeRMSNorm.forward = fwd

    class Rot(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, cos, sin):
            ctx.save_for_backward(cos, sin)
            h = q.shape[-1] // 2
            o = torch.empty_like(q)
            c, s = cos[..., :h], sin[..., :h]
            a, b = q[..., :h], q[..., h:]
            torch.mul(a, c, out=o[..., :h]).addcmul_(b, s, value=-1)
            torch.mul(b, c, out=o[..., h:]).addcmul_(a, s)
            return o

        @staticmethod
        def backward(ctx, g):
            cos, sin = ctx.saved_tensors
            h = g.shape[-1] // 2
            o = torch.empty_like(g)
            c, s = cos[..., :h], sin[..., :h]
            a, b = g[..., :h], g[..., h:]
            torch.mul(a, c, out=o[..., :h]).addcmul_(b, s)
            torch.mul(b, c, out=o[..., h:]).addcmul_(a, s, value=-1)
            return o, None, None

    def rot(q, k, cos, sin, unsqueeze_dim=1):
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        return Rot.apply(q, cos, sin), Rot.apply(k, cos, sin)

    import sys

    if "rot" in sys.argv:
        M.apply_rotary_pos_emb = rot


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(50, 4, 32, dtype=torch.float64, requires_grad=True)
    w = torch.randn(32, dtype=torch.float64, requires_grad=True)
    y = RMS.apply(x, w, 1e-6)
    z = w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    g = torch.randn_like(x)
    print((y - z).abs().max())
    print(
        [
            (a - b).abs().max().item()
            for a, b in zip(torch.autograd.grad(y, [x, w], g), torch.autograd.grad(z, [x, w], g))
        ]
    )
