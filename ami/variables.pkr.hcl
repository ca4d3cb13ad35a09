# All values come from `python -m ami`, which resolves the base image and checks them: docs/images.md.
variable "region" {
  type = string
}

variable "copy_regions" {
  type        = list(string)
  description = "More regions that get the image."
}

variable "base_image" {
  type        = string
  description = "Id, resolved before the build and kept in the image's tags."
}

variable "root_device" {
  type        = string
  description = "Device name of the base image's root volume."
}

variable "name" {
  type = string
}

variable "instance_type" {
  type        = string
  description = "The builder, with the accelerator that the smoke test looks for."
}

variable "subnet" {
  type        = string
  description = "Id; empty: one of the default VPC."
}

variable "disk_gib" {
  type = number
}

variable "kms_key" {
  type        = string
  description = "Alias, id or ARN; empty: the account's key of EBS."
}

variable "cache_arns" {
  type        = list(string)
  description = "Bucket and objects of the compile cache, which the builder may read; none: no cache."
}

variable "deprecate_at" {
  type = string
}

variable "tags" {
  type        = map(string)
  description = "Of the image and its snapshots: versions, commit, base image."
}

variable "build_tags" {
  type        = map(string)
  description = "Of all that exists only during the build: what is left of it is found by them."
}

variable "files" {
  type        = string
  description = "Folder with image.env, constraints.txt and the wheel."
}

variable "manifest" {
  type        = string
  description = "File that Packer writes the ids of the images to."
}

variable "max_minutes" {
  type        = number
  description = "After which the builder ends itself, whatever became of Packer."
}
