# GPUs: NVIDIA's driver and fabric manager, EFA, our environment. Packer runs it as `python -m ami cuda build=true`.
build {
  name    = "cuda"
  sources = ["source.amazon-ebs.machine"]

  provisioner "file" {
    source      = var.files # a folder that is named baretrain
    destination = "/tmp/"
  }

  provisioner "shell" {
    execute_command = "sudo env {{ .Vars }} bash '{{ .Path }}'"
    scripts = [
      "${path.root}/provision/files.sh",
      "${path.root}/provision/common.sh",
      "${path.root}/provision/efa.sh",
      "${path.root}/provision/cuda.sh",
      "${path.root}/provision/baretrain.sh",
      "${path.root}/provision/harden.sh",
      "${path.root}/provision/smoke.sh",
    ]
  }

  post-processor "manifest" {
    output     = var.manifest
    strip_path = true
  }
}
